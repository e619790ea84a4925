"""Mesh axes, sequence layouts and collectives on one axis: the base of every armillary package.

Further functions are imported from their modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from armillary.core.collectives.differentiable import (
    all_gather,
    all_reduce,
    head_to_seq,
    merge_scatter,
    reduce_scatter,
    seq_to_head,
)
from armillary.core.collectives.exchange import FlatBuffer, start_exchange
from armillary.core.collectives.interleaved import all_gather_interleaved, interleaved_shard, reduce_scatter_interleaved
from armillary.core.gradients import sum_gradients
from armillary.core.layout import SequenceLayout, attention_balance, attention_traffic
from armillary.core.mesh import AXES, Axis, build_mesh, start_process_group
from armillary.core.neighbours import halo, relayout, shift, short_convolution
from armillary.core.observe.label import label
from armillary.core.observe.ledger import CommLedger
from armillary.core.observe.trace import Trace, span

if TYPE_CHECKING:
    from armillary.core.logsumexp_partial import LogSumExpPartial
    from armillary.core.sequence import distribute_sequence, gather_sequence

__all__ = [
    "AXES",
    "Axis",
    "CommLedger",
    "FlatBuffer",
    "LogSumExpPartial",
    "SequenceLayout",
    "Trace",
    "all_gather",
    "all_gather_interleaved",
    "all_reduce",
    "attention_balance",
    "attention_traffic",
    "build_mesh",
    "distribute_sequence",
    "gather_sequence",
    "halo",
    "head_to_seq",
    "interleaved_shard",
    "label",
    "merge_scatter",
    "reduce_scatter",
    "reduce_scatter_interleaved",
    "relayout",
    "seq_to_head",
    "shift",
    "short_convolution",
    "span",
    "start_exchange",
    "start_process_group",
    "sum_gradients",
]


_DTENSOR_MODULES = {
    "LogSumExpPartial": "logsumexp_partial",
    "distribute_sequence": "sequence",
    "gather_sequence": "sequence",
}
"""Modules of the names that need torch's DTensor, which takes seconds to import."""


def __getattr__(name: str) -> object:
    """Imports names that need DTensor at their first use."""
    if name in _DTENSOR_MODULES:
        return getattr(import_module(f"armillary.core.{_DTENSOR_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
