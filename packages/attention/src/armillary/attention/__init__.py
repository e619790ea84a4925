"""Exact attention over sequences sharded across ranks: Ring, Ulysses, and their compositions."""

from armillary.attention.comm_plan import Schedule, Work
from armillary.attention.integrations import register_transformers, sdpa_parallel, sequence
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.all_gather import AllGatherKV
from armillary.attention.methods.base import Method
from armillary.attention.methods.local import Local
from armillary.attention.methods.ring import Ring
from armillary.attention.methods.sources import Projected
from armillary.attention.methods.token_ring import TokenRing
from armillary.attention.methods.ulysses import Ulysses
from armillary.attention.methods.upipe import UPipe
from armillary.attention.methods.wallfacer import WallFacer
from armillary.attention.projections import Projections, TokenProjections
from armillary.attention.reference import reference_attention
from armillary.attention.registry import build_attention, build_schedule
from armillary.attention.spec import Call, Saved

__all__ = [
    "AllGatherKV",
    "AttentionMask",
    "Call",
    "Local",
    "Method",
    "Projected",
    "Projections",
    "Ring",
    "Saved",
    "Schedule",
    "TokenProjections",
    "TokenRing",
    "UPipe",
    "Ulysses",
    "WallFacer",
    "Work",
    "build_attention",
    "build_schedule",
    "reference_attention",
    "register_transformers",
    "sdpa_parallel",
    "sequence",
]
