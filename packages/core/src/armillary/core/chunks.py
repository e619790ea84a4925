"""Cutting tokens into chunks, so that what is made of each need not exist for all at once."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

LEAST = 4096
"""Tokens that keep a matrix multiplication busy."""
MOST_CHUNKS = 64
"""Beyond these, what a chunk needs is little beside what is there anyway, and more of them only cost launches."""


def chunks(tokens: int, size: int | None = None) -> list[slice]:
    """`tokens` in consecutive chunks of `size`, the last one shorter; at least one chunk, which may be empty.

    Args:
        size: tokens of a chunk; unless given, 4096, or more where that would make over 64 chunks.

    Raises:
        ValueError: a size below 1.
    """
    size = max(LEAST, -(-tokens // MOST_CHUNKS)) if size is None else size
    if size < 1:
        raise ValueError(f"chunks of {size} tokens: at least 1 is needed")
    cut = [slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size)]
    return cut if not is_simulating() or len(cut) < 4 else [*cut[:2], cut[-1]]


def at_tokens(x: Tensor, tokens: slice) -> Tensor:
    """x [B, T, ...] at a chunk of its tokens: a view, or itself where these are all."""
    return x if tokens == slice(0, x.shape[1]) else x[:, tokens]


_simulating: ContextVar[bool] = ContextVar("simulating", default=False)


def is_simulating() -> bool:
    """Whether this thread is inside `simulating`."""
    return _simulating.get()


@contextmanager
def simulating() -> Generator[None]:
    """Meanwhile, on this thread, of many chunks there are the first two and the last: the others are like the second.

    For simulations on tensors that hold no numbers. What is allocated when stays as it is, in far fewer steps.
    """
    token = _simulating.set(True)
    try:
        yield
    finally:
        _simulating.reset(token)
