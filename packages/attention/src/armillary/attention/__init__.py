"""Exact attention over sequences sharded across ranks: Ring, Ulysses, and their compositions."""

from importlib.metadata import version

from armillary.attention.call.qkv_sources import Projected, Projections, TokenProjections
from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.context_parallel import ContextParallel, sdpa_parallel, sequence
from armillary.attention.mask import AttentionMask, Slice
from armillary.attention.method_registry import build_attention, build_comm_plan
from armillary.attention.methods.all_gather import AllGatherKV
from armillary.attention.methods.base import Method
from armillary.attention.methods.local import Local
from armillary.attention.methods.ring import Ring
from armillary.attention.methods.token_ring import TokenRing
from armillary.attention.methods.ulysses import Ulysses
from armillary.attention.methods.upipe import UPipe
from armillary.attention.methods.wallfacer import WallFacer
from armillary.attention.plans.comm_plan import AttentionShape, CommPlan
from armillary.attention.reference import reference_attention

__all__ = [
    "AllGatherKV",
    "AttentionMask",
    "AttentionShape",
    "AttentionSpec",
    "CommPlan",
    "ContextParallel",
    "Local",
    "Method",
    "Projected",
    "Projections",
    "Ring",
    "Saved",
    "Slice",
    "TokenProjections",
    "TokenRing",
    "UPipe",
    "Ulysses",
    "WallFacer",
    "__version__",
    "build_attention",
    "build_comm_plan",
    "reference_attention",
    "sdpa_parallel",
    "sequence",
]

__version__ = version("armillary-attention")
