"""Cutting tokens into chunks, so that what is made of each need not exist for all at once; and adding up gradients."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from armillary.core.collectives.collective import accumulation_dtype

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


class Totals:
    """Gradients of parameters, summed over chunks in the accumulation dtype, so that each is rounded once.

    Args:
        parameters: those that want a gradient.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self.parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._owned: set[int] = set()

    def add(self, shares: Iterable[Tensor | None]) -> None:
        """Takes in a share for each parameter; None for one that nothing comes from."""
        for i, share in enumerate(shares):
            total = self._sums[i]
            if share is None or total is None:
                self._sums[i] = share if total is None else total
                continue
            if i not in self._owned:  # the first share may be a view of somebody's tensor
                total = total.to(accumulation_dtype(share.dtype), copy=True)
                self._owned.add(i)
            self._sums[i] = total.add_(share)

    def result(self) -> list[Tensor | None]:
        """The sums, in the dtypes that gradients are to have; None where nothing came."""
        return [
            None if total is None else total.to(gradient_dtype(parameter))
            for total, parameter in zip(self._sums, self.parameters, strict=True)
        ]


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """What the parameter's gradient comes in; FSDP may ask for float32 for a parameter in bfloat16."""
    asked: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if asked is None else asked
