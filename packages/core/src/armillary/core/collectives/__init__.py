"""Collectives on one axis of a mesh: asynchronous ones, which are imported from here, and differentiable ones."""

from armillary.core.collectives.all_gather import start_all_gather
from armillary.core.collectives.all_to_all import start_head_to_seq, start_seq_to_head
from armillary.core.collectives.collective import Collective
from armillary.core.collectives.exchange import Exchange, FlatBuffer, ReceiveBuffers, start_exchange
from armillary.core.collectives.merge import merge_, start_merge_scatter
from armillary.core.collectives.reduce_scatter import start_reduce_scatter, start_scatter_parts

__all__ = [
    "Collective",
    "Exchange",
    "FlatBuffer",
    "ReceiveBuffers",
    "merge_",
    "start_all_gather",
    "start_exchange",
    "start_head_to_seq",
    "start_merge_scatter",
    "start_reduce_scatter",
    "start_scatter_parts",
    "start_seq_to_head",
]
