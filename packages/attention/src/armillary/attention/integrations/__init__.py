"""Attention methods inside models that were written for one device: SDPA calls, Hugging Face's two libraries."""

from typing import TYPE_CHECKING

from armillary.attention.integrations.batch import ShardedBatch, shard_batch, whole_loss, whole_sequence
from armillary.attention.integrations.diffusers import parallelize_diffusers
from armillary.attention.integrations.rows import share_rows
from armillary.attention.integrations.sdpa import sdpa_parallel
from armillary.attention.integrations.sequence import sequence
from armillary.attention.integrations.trainer import ContextParallelTrainer
from armillary.attention.integrations.transformers import register_transformers
from armillary.attention.integrations.transformers_models import padding_idx_of

if TYPE_CHECKING:
    from armillary.attention.integrations.context_parallel import ContextParallel

__all__ = [
    "ContextParallel",
    "ContextParallelTrainer",
    "ShardedBatch",
    "padding_idx_of",
    "parallelize_diffusers",
    "register_transformers",
    "sdpa_parallel",
    "sequence",
    "shard_batch",
    "share_rows",
    "whole_loss",
    "whole_sequence",
]


def __getattr__(name: str) -> object:
    """Imports what takes torch's DTensor when it is asked for: that takes seconds."""
    if name == "ContextParallel":
        from armillary.attention.integrations.context_parallel import ContextParallel

        return ContextParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
