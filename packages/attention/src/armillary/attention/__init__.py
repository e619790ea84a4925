"""Exact attention over sequences sharded across ranks: Ring, Ulysses, and their compositions."""

from armillary.attention.all_gather import AllGatherKV
from armillary.attention.build import build_attention, build_schedule
from armillary.attention.call import Call, Saved
from armillary.attention.integrations import register_transformers, sdpa_parallel, sequence
from armillary.attention.local import Local
from armillary.attention.mask import AttentionMask
from armillary.attention.method import Method
from armillary.attention.projections import Projections, TokenProjections
from armillary.attention.reference import reference_attention
from armillary.attention.ring import Ring
from armillary.attention.schedule import Schedule, Work
from armillary.attention.sources import Projected
from armillary.attention.token_ring import TokenRing
from armillary.attention.ulysses import Ulysses
from armillary.attention.upipe import UPipe
from armillary.attention.wall_facer import WallFacer

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
