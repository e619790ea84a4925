"""Attention methods inside models that were written for one device: SDPA calls, and Hugging Face transformers."""

from typing import TYPE_CHECKING

from armillary.attention.integrations.batch import ShardedBatch, shard_batch, whole_loss
from armillary.attention.integrations.sdpa import sdpa_parallel
from armillary.attention.integrations.sequence import sequence
from armillary.attention.integrations.transformers import register_transformers

if TYPE_CHECKING:
    from armillary.attention.integrations.context_parallel import ContextParallel

__all__ = [
    "ContextParallel",
    "ShardedBatch",
    "register_transformers",
    "sdpa_parallel",
    "sequence",
    "shard_batch",
    "whole_loss",
]


def __getattr__(name: str) -> object:
    """Imports what takes torch's DTensor when it is asked for: that takes seconds."""
    if name == "ContextParallel":
        from armillary.attention.integrations.context_parallel import ContextParallel

        return ContextParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
