"""Context parallelism for models of plain torch: batches, SDPA routing and a style of `parallelize_module`."""

from typing import TYPE_CHECKING

from armillary.attention.context_parallel.batch import ShardedBatch, shard_batch, whole_loss, whole_sequence
from armillary.attention.context_parallel.parallel import ContextParallel, ContextParallelBatch
from armillary.attention.context_parallel.sdpa import sdpa_parallel
from armillary.attention.context_parallel.sequence import sequence

if TYPE_CHECKING:
    from armillary.attention.context_parallel.style import ContextParallelStyle

__all__ = [
    "ContextParallel",
    "ContextParallelBatch",
    "ContextParallelStyle",
    "ShardedBatch",
    "sdpa_parallel",
    "sequence",
    "shard_batch",
    "whole_loss",
    "whole_sequence",
]


def __getattr__(name: str) -> object:
    """Imports the style on first use: it needs torch's DTensor, whose import takes seconds."""
    if name == "ContextParallelStyle":
        from armillary.attention.context_parallel.style import ContextParallelStyle

        return ContextParallelStyle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
