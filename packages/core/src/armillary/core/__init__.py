"""Mesh axes, sequence layouts and collectives on one axis: what every armillary package stands on."""

from armillary.core.balance import Visibility
from armillary.core.chunks import Totals, chunks, simulating
from armillary.core.cluster import Accelerator, Cluster
from armillary.core.collectives.all_to_all import (
    PackedHeads,
    start_head_to_parts,
    start_head_to_seq,
    start_packed_to_head,
    start_seq_to_head,
)
from armillary.core.collectives.collective import Collective, accumulation_dtype
from armillary.core.collectives.differentiable import (
    all_gather,
    head_to_seq,
    merge_scatter,
    reduce_scatter,
    seq_to_head,
)
from armillary.core.collectives.exchange import Exchange, FlatBuffer, FlatBuffers, start_exchange
from armillary.core.collectives.gather import (
    merge_,
    start_all_gather,
    start_merge_scatter,
    start_reduce_scatter,
    start_scatter_parts,
)
from armillary.core.collectives.interleaved import (
    all_gather_interleaved,
    interleaved_shard,
    pad_to_multiple,
    reduce_scatter_interleaved,
)
from armillary.core.gradients import sum_gradients
from armillary.core.layout import SequenceLayout, Spans, attention_balance, cut_at
from armillary.core.mesh import AXES, Axis, build_mesh, start_process_group
from armillary.core.network import Delivery, Link, Send
from armillary.core.observe.label import Label, current_label, label
from armillary.core.observe.ledger import CommLedger
from armillary.core.observe.trace import Trace, span
from armillary.core.recompute import RNGReplay, capture_autocast, outside_autocast

__all__ = [
    "AXES",
    "Accelerator",
    "Axis",
    "Cluster",
    "Collective",
    "CommLedger",
    "Delivery",
    "Exchange",
    "FlatBuffer",
    "FlatBuffers",
    "Label",
    "Link",
    "PackedHeads",
    "RNGReplay",
    "Send",
    "SequenceLayout",
    "Spans",
    "Totals",
    "Trace",
    "Visibility",
    "accumulation_dtype",
    "all_gather",
    "all_gather_interleaved",
    "attention_balance",
    "build_mesh",
    "capture_autocast",
    "chunks",
    "current_label",
    "cut_at",
    "head_to_seq",
    "interleaved_shard",
    "label",
    "merge_",
    "merge_scatter",
    "outside_autocast",
    "pad_to_multiple",
    "reduce_scatter",
    "reduce_scatter_interleaved",
    "seq_to_head",
    "simulating",
    "span",
    "start_all_gather",
    "start_exchange",
    "start_head_to_parts",
    "start_head_to_seq",
    "start_merge_scatter",
    "start_packed_to_head",
    "start_process_group",
    "start_reduce_scatter",
    "start_scatter_parts",
    "start_seq_to_head",
    "sum_gradients",
]
