# pyright: reportUnusedImport=false
# ruff: noqa: F401
"""Communication plans and memory formulas of attention methods: pure values, for planners and tests. No tensors.

comm_plan         the sends and the computation of a call, step by step, and their building blocks
method_plan       base classes of a method's plan, and the terms that formulas of peak memory share
ring_plans        plans of the methods on one sequence axis
node_ring_plans   plans of rings between nodes
head_plans        plans of the methods on the head axis
"""

from armillary.attention.plans.comm_plan import (
    Block,
    JoinedShards,
    Kind,
    Move,
    Payload,
    Role,
    Send,
    Step,
    all_gather,
    reduce_scatter,
    send_to_each,
    steps,
)
from armillary.attention.plans.head_plans import UlyssesPlan, UPipePlan, head_stages
from armillary.attention.plans.method_plan import HeadStages, SequencePlan, Sizes, kernel_backward, kernel_forward
from armillary.attention.plans.ring_plans import RingPlan, TokenRingPlan, WallFacerPlan
