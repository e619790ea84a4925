"""Methods by name and their communication plans, for the trainer and the planner."""

from armillary.attention.methods.rank_grid import check_rank_grid
from armillary.attention.methods.teams import Placement
from armillary.attention.planning.comm_plan import (
    Move,
    Payload,
    Send,
    Step,
    all_gather,
    reduce_scatter,
    send_to_each,
    steps,
)
from armillary.attention.planning.heads import UPipePlan, head_stages
from armillary.attention.planning.memory import HeadStages, Sizes
from armillary.attention.registry.entry import MethodOptions
from armillary.attention.registry.named import NamedMethod, methods_without_plan, named_method, names, variants
from armillary.attention.registry.table import ALIASES, HEAD_METHODS, SEQUENCE_METHODS

__all__ = [
    "ALIASES",
    "HEAD_METHODS",
    "SEQUENCE_METHODS",
    "HeadStages",
    "MethodOptions",
    "Move",
    "NamedMethod",
    "Payload",
    "Placement",
    "Send",
    "Sizes",
    "Step",
    "UPipePlan",
    "all_gather",
    "check_rank_grid",
    "head_stages",
    "methods_without_plan",
    "named_method",
    "names",
    "reduce_scatter",
    "send_to_each",
    "steps",
    "variants",
]
