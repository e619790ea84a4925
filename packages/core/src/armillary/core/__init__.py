"""Mesh axes, sequence layouts and collectives on one axis: the base of every armillary package.

Names in `__all__` are imported from here. Their modules hold further functions for the packages above.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from armillary.core.collectives.collective import (
    Collective,
    accumulation_dtype,
    start_all_gather,
    start_head_to_seq,
    start_reduce_scatter,
    start_scatter_parts,
    start_seq_to_head,
)
from armillary.core.collectives.differentiable import (
    all_gather,
    all_reduce,
    head_to_seq,
    merge_scatter,
    reduce_scatter,
    seq_to_head,
)
from armillary.core.collectives.exchange import Exchange, FlatBuffer, ReceiveBuffers, start_exchange
from armillary.core.collectives.merge import merge_, start_merge_scatter
from armillary.core.compat import imported_at_first_use
from armillary.core.gradients import clip_gradients, sum_gradients
from armillary.core.label_triples import LabelTriples
from armillary.core.layout import SequenceLayout, attention_balance, attention_traffic
from armillary.core.ledger import CommLedger
from armillary.core.mesh import Axis, build_mesh, start_process_group, to_device, world_size
from armillary.core.slices import Segments
from armillary.core.spans import TokenRanges
from armillary.core.token_moves import halo, relayout, shift, short_convolution
from armillary.core.trace import Trace, label, span

if TYPE_CHECKING:
    from armillary.core.dtensor import distribute_sequence, gather_sequence, sequence_from_local
    from armillary.core.logsumexp_partial import LogSumExpPartial

__all__ = [
    "Axis",
    "Collective",
    "CommLedger",
    "Exchange",
    "FlatBuffer",
    "LabelTriples",
    "LogSumExpPartial",
    "ReceiveBuffers",
    "Segments",
    "SequenceLayout",
    "TokenRanges",
    "Trace",
    "__version__",
    "accumulation_dtype",
    "all_gather",
    "all_reduce",
    "attention_balance",
    "attention_traffic",
    "build_mesh",
    "clip_gradients",
    "distribute_sequence",
    "gather_sequence",
    "halo",
    "head_to_seq",
    "label",
    "merge_",
    "merge_scatter",
    "reduce_scatter",
    "relayout",
    "seq_to_head",
    "sequence_from_local",
    "shift",
    "short_convolution",
    "span",
    "start_all_gather",
    "start_exchange",
    "start_head_to_seq",
    "start_merge_scatter",
    "start_process_group",
    "start_reduce_scatter",
    "start_scatter_parts",
    "start_seq_to_head",
    "sum_gradients",
    "to_device",
    "world_size",
]

__version__ = version("armillary-core")

_DTENSOR_MODULES = {
    "armillary.core.dtensor": (
        "distribute_sequence",
        "gather_sequence",
        "sequence_from_local",
    ),
    "armillary.core.logsumexp_partial": ("LogSumExpPartial",),
}
"""Modules that need torch's DTensor, which takes seconds to import."""

__getattr__ = imported_at_first_use(__name__, _DTENSOR_MODULES)
