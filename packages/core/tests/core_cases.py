"""Tensors and calls that several of core's tests share."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from armillary.core import CommLedger, SequenceLayout
from armillary.core.testing import Dispatched

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


def paths(ends: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Returns the positions on the path from the root of a tree of segments to each position."""
    paths_of_positions = list[list[int]]()
    for segment, parent in enumerate(parents):
        before = paths_of_positions[ends[parent + 1] - 1] if parent >= 0 else []
        for position in range(ends[segment], ends[segment + 1]):
            before = [*before, position]
            paths_of_positions.append(before)
    return paths_of_positions


@contextmanager
def poisoned() -> Generator[None]:
    """Makes `torch.empty` return NaN."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def counted() -> Generator[CommLedger]:
    """Makes `torch.empty` return NaN, and holds the ledger to torch's dispatcher: it has all bytes that were sent."""
    with poisoned(), Dispatched() as dispatched, CommLedger() as ledger:
        yield ledger
    assert dispatched.sent == Dispatched.of(ledger)
