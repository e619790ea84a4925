"""Chunks of tokens. Computing them one after the other keeps the intermediate results of one chunk in memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

MIN_TOKENS = 4096
"""Number of tokens with which a matrix multiplication is efficient."""
MAX_CHUNKS = 64
"""Largest default number of chunks. Smaller chunks would save little more memory for many more kernel launches."""


def chunks(tokens: int, size: int | None = None) -> list[slice]:
    """Returns consecutive slices of `size` tokens, by default of `MIN_TOKENS` and at most `MAX_CHUNKS` of them."""
    size = max(MIN_TOKENS, -(-tokens // MAX_CHUNKS)) if size is None else size
    if size < 1:
        raise ValueError(f"chunks of {size} tokens: at least 1 is needed")
    slices = [slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size)]
    return slices if not is_simulating() or len(slices) < 4 else [*slices[:2], slices[-1]]


def at_tokens(x: Tensor, tokens: slice) -> Tensor:
    return x if tokens == slice(0, x.shape[1]) else x[:, tokens]


_simulating: ContextVar[bool] = ContextVar("simulating", default=False)


def is_simulating() -> bool:
    return _simulating.get()


@contextmanager
def simulating() -> Generator[None]:
    """Context in which `chunks` returns only the first two chunks and the last, for simulations of memory."""
    # The omitted chunks allocate what the second one does, so the peak of memory is the same with far fewer steps.
    token = _simulating.set(True)
    try:
        yield
    finally:
        _simulating.reset(token)
