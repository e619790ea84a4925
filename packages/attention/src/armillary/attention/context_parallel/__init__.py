"""Context parallelism for models: one object for a training loop, SDPA routing, a style of `parallelize_module`."""

from typing import TYPE_CHECKING

from armillary.attention.context_parallel.batch import ContextParallelBatch
from armillary.attention.context_parallel.context_parallel import ContextParallel
from armillary.attention.context_parallel.sdpa import sdpa_parallel
from armillary.attention.context_parallel.sequence import sequence

if TYPE_CHECKING:
    from armillary.attention.context_parallel.style import ContextParallelStyle

__all__ = [
    "ContextParallel",
    "ContextParallelBatch",
    "ContextParallelStyle",
    "sdpa_parallel",
    "sequence",
]


def __getattr__(name: str) -> object:
    """Imports the style on first use: it needs torch's DTensor, whose import takes seconds."""
    if name == "ContextParallelStyle":
        from armillary.attention.context_parallel.style import ContextParallelStyle

        return ContextParallelStyle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
