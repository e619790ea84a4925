"""Tensors and calls that several of core's tests share."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from armillary.core import CommLedger, SequenceLayout
from armillary.core.testing import Dispatched

LAYOUTS = {"contiguous": SequenceLayout.contiguous, "zigzag": SequenceLayout.zigzag, "striped": SequenceLayout.striped}


def random(seed: int, *shape: int) -> Tensor:
    """Random numbers that are equal on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def each(function: Callable[..., object], cases: Sequence[Sequence[object]]) -> list[object]:
    return [function(*case) for case in cases]


def partial(
    rank: int, tokens: int, dtype: torch.dtype = torch.float64, batch: int = 2, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Partial attention of a rank. Token 0 sees no key on any rank, token 1 only on rank 2, others on some ranks."""
    out, lse = random(rank, batch, tokens, 6, 4), random(50 + rank, batch, tokens, 6) * 3 + shift
    blind = random(90 + rank, *lse.shape) > 0.5
    blind[:, 0], blind[:, 1] = True, rank != 2
    out = out.masked_fill(blind.unsqueeze(-1), 0).to(dtype)
    return out, lse.masked_fill(blind, -torch.inf).to(torch.promote_types(dtype, torch.float32))


def merged_by_softmax(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges by a softmax over the ranks, without pairwise log-sum-exp and without a pivot, in float64."""
    outs, lses = torch.stack([out for out, _ in parts]).double(), torch.stack([lse for _, lse in parts]).double()
    visible = (lses > -torch.inf).any(0)
    safe = torch.where(visible, lses, 0)
    weights = torch.where(visible, safe.softmax(0), 0)
    return (weights.unsqueeze(-1) * outs).sum(0), torch.where(visible, safe.logsumexp(0), -torch.inf)


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
