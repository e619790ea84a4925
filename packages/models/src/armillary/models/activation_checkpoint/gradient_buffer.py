"""Reuses an incoming gradient's memory if nothing else refers to it.

Saves one tensor of the size of x [B, T, E] at the peak of a step: simulated, four blocks of LLaMA 3 8B with 131,072
tokens on each of 8 ranks take 17.07 GiB instead of 18.07. Autograd makes no promise, so references are counted.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.core.internal import compat


def writable(grad_outputs: tuple[Tensor, ...]) -> Tensor:
    """Returns the one gradient in `grad_outputs` if it is contiguous and nothing else refers to it, else a copy.

    Call it first in the `backward(ctx, *grad_outputs)` of a once-differentiable `autograd.Function`.
    """
    # If a hook, a caller of `torch.autograd.grad` or another node of the graph keeps the gradient, or if it is a view
    # of another tensor, it has at least one reference more.
    counts = references(grad_outputs)
    (grad,) = grad_outputs
    unshared = all(count <= baseline for count, baseline in zip(counts, baseline_counts(type(grad)), strict=True))
    if unshared and grad.is_contiguous() and grad.untyped_storage().nbytes() == grad.nbytes:
        return grad
    return grad.clone(memory_format=torch.contiguous_format)


def references(grad_outputs: tuple[Tensor, ...]) -> tuple[int, int, int]:
    """Returns three reference counts of the gradient: of its Python object, its C++ tensor, and its storage (views)."""
    return sys.getrefcount(grad_outputs[0]), *compat.references(grad_outputs[0])


@cache
def baseline_counts(kind: type[Tensor]) -> tuple[int, int, int]:
    """Returns the reference counts of an unshared gradient of this class."""
    # Measured, because autograd's engine has references too, whose number differs between releases.
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        if type(x.detach()) is not kind:  # a tensor subclass may have references of its own: always copy
            return 0, 0, 0
        counts: list[tuple[int, int, int]] = []
        probe = cast(Any, _Probe).apply
        # Two nodes, of which the first gets its gradient from the second, as a block does, and not from the caller.
        probe(probe(x, counts), counts).backward(torch.ones(1))
    return counts[-1]


class _Probe(torch.autograd.Function):
    """Records the references to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[tuple[int, int, int]]) -> Tensor:
        ctx.counts = counts
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.counts.append(references(grad_outputs))
        return grad_outputs[0].clone(), None
