"""Mesh axes, sequence layouts and collectives on one axis: what every armillary package stands on."""

from armillary.core.all_to_all import AllToAll, start_head_to_seq, start_seq_to_head
from armillary.core.exchange import Exchange, start_exchange
from armillary.core.layout import SequenceLayout, Spans
from armillary.core.ledger import CommLedger
from armillary.core.mesh import AXES, Axis, build_mesh, start_process_group

__all__ = [
    "AXES",
    "AllToAll",
    "Axis",
    "CommLedger",
    "Exchange",
    "SequenceLayout",
    "Spans",
    "build_mesh",
    "start_exchange",
    "start_head_to_seq",
    "start_process_group",
    "start_seq_to_head",
]
