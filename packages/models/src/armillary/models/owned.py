"""Whether a gradient that autograd hands over belongs to nobody else, so that it may be overwritten."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def writable(grad_outputs: tuple[Tensor, ...]) -> Tensor:
    """The one gradient in `grad_outputs`, if nobody else refers to it; else a copy.

    To be called from the `backward(ctx, *grad_outputs)` of a once-differentiable `autograd.Function`, before anything
    else there refers to the gradient: a hook, a caller of `torch.autograd.grad` or a neighbour in the graph that keeps
    it shows as one reference more than usual.
    """
    python, autograd = references(grad_outputs)
    (grad,) = grad_outputs
    most_python, most_autograd = usual(type(grad))
    alone = python <= most_python and autograd <= most_autograd
    if alone and grad.is_contiguous() and grad.untyped_storage().nbytes() == grad.nbytes:
        return grad
    return grad.clone(memory_format=torch.contiguous_format)


def references(grad_outputs: tuple[Tensor, ...]) -> tuple[int, int]:
    """How many refer to the gradient: from Python, and from autograd's own code."""
    return sys.getrefcount(grad_outputs[0]), cast(Any, grad_outputs[0])._use_count()


@cache
def usual(kind: type[Tensor]) -> tuple[int, int]:
    """The references to a gradient of this class that belongs to nobody else, in this release of torch: tried out."""
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        if type(x.detach()) is not kind:  # a subclass that does its own counting
            return 0, 0
        found: list[tuple[int, int]] = []
        probe = cast(Any, _Probe).apply
        probe(probe(x, found), found).backward(torch.ones(1))
    return found[-1]


class _Probe(torch.autograd.Function):
    """Notes the references to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[tuple[int, int]]) -> Tensor:
        ctx.found = found
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.found.append(references(grad_outputs))
        return grad_outputs[0].clone(), None
