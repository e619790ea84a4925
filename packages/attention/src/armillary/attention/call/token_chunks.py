"""Chunks of tokens, so that intermediate results exist for one chunk at a time."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

MIN_TOKENS = 4096
"""Tokens that keep a matrix multiplication busy."""
MAX_CHUNKS = 64
"""With more chunks, kernel launches cost more than the memory that smaller chunks save."""


def chunks(tokens: int, size: int | None = None) -> list[slice]:
    """Returns consecutive slices of `size` tokens, the last one shorter; at least one slice, which may be empty.

    Args:
        size: tokens of a chunk. By default 4096, or more where that would make over 64 chunks.

    Raises:
        ValueError: a size below 1.
    """
    size = max(MIN_TOKENS, -(-tokens // MAX_CHUNKS)) if size is None else size
    if size < 1:
        raise ValueError(f"chunks of {size} tokens: at least 1 is needed")
    slices = [slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size)]
    return slices if not is_simulating() or len(slices) < 4 else [*slices[:2], slices[-1]]


def at_tokens(x: Tensor, tokens: slice) -> Tensor:
    """Returns a view of x [B, T, ...] at a chunk of its tokens, or x itself where the chunk has all of them."""
    return x if tokens == slice(0, x.shape[1]) else x[:, tokens]


_simulating: ContextVar[bool] = ContextVar("simulating", default=False)


def is_simulating() -> bool:
    """Returns True inside `simulating` on this thread."""
    return _simulating.get()


@contextmanager
def simulating() -> Generator[None]:
    """Context in which `chunks` returns the first two chunks and the last, for simulations without numbers.

    All chunks between allocate the same as the second, so that peaks of memory stay the same in far fewer steps.
    """
    token = _simulating.set(True)
    try:
        yield
    finally:
        _simulating.reset(token)
