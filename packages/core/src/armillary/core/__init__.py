"""Mesh axes, sequence layouts and collectives on one axis: what every armillary package stands on."""

from armillary.core.balance import Visibility
from armillary.core.chunks import Totals, pieces, rehearsing
from armillary.core.cluster import Accelerator, Cluster
from armillary.core.collectives.all_to_all import (
    PackedHeads,
    start_head_to_parts,
    start_head_to_seq,
    start_packed_to_head,
    start_seq_to_head,
)
from armillary.core.collectives.collective import Collective, wide
from armillary.core.collectives.differentiable import gather_seq, head_to_seq, merge_scatter, scatter_sum, seq_to_head
from armillary.core.collectives.exchange import Exchange, Parcel, Parcels, start_exchange
from armillary.core.collectives.gather import (
    merge_,
    start_gather_seq,
    start_merge_scatter,
    start_scatter_parts,
    start_scatter_sum,
)
from armillary.core.collectives.interleaved import filled, gather_dealt, own_dealt, sum_dealt
from armillary.core.gradients import sum_gradients
from armillary.core.layout import SequenceLayout, Spans, attention_balance, cut_at
from armillary.core.mesh import AXES, Axis, build_mesh, start_process_group
from armillary.core.network import Delivery, Link, Send
from armillary.core.observe.label import Label, current_label, label
from armillary.core.observe.ledger import CommLedger
from armillary.core.observe.trace import Trace, span
from armillary.core.recompute import Draws, as_now, outside_autocast

__all__ = [
    "AXES",
    "Accelerator",
    "Axis",
    "Cluster",
    "Collective",
    "CommLedger",
    "Delivery",
    "Draws",
    "Exchange",
    "Label",
    "Link",
    "PackedHeads",
    "Parcel",
    "Parcels",
    "Send",
    "SequenceLayout",
    "Spans",
    "Totals",
    "Trace",
    "Visibility",
    "as_now",
    "attention_balance",
    "build_mesh",
    "current_label",
    "cut_at",
    "filled",
    "gather_dealt",
    "gather_seq",
    "head_to_seq",
    "label",
    "merge_",
    "merge_scatter",
    "outside_autocast",
    "own_dealt",
    "pieces",
    "rehearsing",
    "scatter_sum",
    "seq_to_head",
    "span",
    "start_exchange",
    "start_gather_seq",
    "start_head_to_parts",
    "start_head_to_seq",
    "start_merge_scatter",
    "start_packed_to_head",
    "start_process_group",
    "start_scatter_parts",
    "start_scatter_sum",
    "start_seq_to_head",
    "sum_dealt",
    "sum_gradients",
    "wide",
]
