"""Layers with a state along the sequence, over sequences that are sharded across ranks."""

from importlib.metadata import version

from armillary.states.comm_plan import gathered_elements, halo_comm_plan, relayout_comm_plan, state_comm_plan
from armillary.states.layers import gated_delta_rule, ssd

__all__ = [
    "__version__",
    "gated_delta_rule",
    "gathered_elements",
    "halo_comm_plan",
    "relayout_comm_plan",
    "ssd",
    "state_comm_plan",
]

__version__ = version("armillary-states")
