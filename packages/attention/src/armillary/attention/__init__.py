"""Exact attention over sequences sharded across ranks: Ring, Ulysses, and their compositions."""

from armillary.attention.build import build_attention
from armillary.attention.call import Call, Saved
from armillary.attention.local import Local
from armillary.attention.mask import AttentionMask
from armillary.attention.method import Method
from armillary.attention.reference import reference_attention
from armillary.attention.ring import Ring
from armillary.attention.token_ring import TokenRing
from armillary.attention.ulysses import Ulysses

__all__ = [
    "AttentionMask",
    "Call",
    "Local",
    "Method",
    "Ring",
    "Saved",
    "TokenRing",
    "Ulysses",
    "build_attention",
    "reference_attention",
]
