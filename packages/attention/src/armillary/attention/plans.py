# pyright: reportUnusedImport=false
# ruff: noqa: F401
"""Methods by name and their communication plans, for the trainer and the planner."""

from armillary.attention.comm_plans.comm_plan import (
    Move,
    Payload,
    Send,
    Step,
    all_gather,
    reduce_scatter,
    send_to_each,
    steps,
)
from armillary.attention.comm_plans.heads import UPipePlan, head_stages
from armillary.attention.comm_plans.method_plan import HeadStages, Sizes
from armillary.attention.methods.base import check_rank_grid
from armillary.attention.methods.wallfacer import Placement
from armillary.attention.registry import (
    ALIASES,
    HEAD_METHODS,
    SEQUENCE_METHODS,
    MethodOptions,
    NamedMethod,
    methods_without_plan,
    named_method,
    names,
    variants,
)
