"""Mesh axes, sequence layouts and collectives on one axis: what every armillary package stands on.

What is not among these is imported from its module.
"""

from armillary.core.collectives.differentiable import (
    all_gather,
    head_to_seq,
    merge_scatter,
    reduce_scatter,
    seq_to_head,
)
from armillary.core.collectives.exchange import FlatBuffer, start_exchange
from armillary.core.collectives.interleaved import all_gather_interleaved, interleaved_shard, reduce_scatter_interleaved
from armillary.core.gradients import sum_gradients
from armillary.core.layout import SequenceLayout, attention_balance
from armillary.core.mesh import AXES, Axis, build_mesh, start_process_group
from armillary.core.observe.label import label
from armillary.core.observe.ledger import CommLedger
from armillary.core.observe.trace import Trace, span

__all__ = [
    "AXES",
    "Axis",
    "CommLedger",
    "FlatBuffer",
    "SequenceLayout",
    "Trace",
    "all_gather",
    "all_gather_interleaved",
    "attention_balance",
    "build_mesh",
    "head_to_seq",
    "interleaved_shard",
    "label",
    "merge_scatter",
    "reduce_scatter",
    "reduce_scatter_interleaved",
    "seq_to_head",
    "span",
    "start_exchange",
    "start_process_group",
    "sum_gradients",
]
