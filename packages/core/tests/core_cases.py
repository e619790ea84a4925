"""Tensors and calls that several of core's tests share."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from armillary.core import SequenceLayout

LAYOUTS = {
    "contiguous": SequenceLayout.contiguous,
    "zigzag": SequenceLayout.zigzag,
    "striped": SequenceLayout.striped,
}


def random(seed: int, *shape: int) -> Tensor:
    """Random numbers that are equal on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def each(function: Callable[..., object], cases: Sequence[Sequence[object]]) -> list[object]:
    return [function(*case) for case in cases]


@contextmanager
def poisoned() -> Generator[None]:
    """Makes `torch.empty` return NaN."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
