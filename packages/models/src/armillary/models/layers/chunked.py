"""Token-wise functions, run on a few tokens at a time, so that intermediate results never exist for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from armillary.attention.call.gradient_sums import GradientSums
from armillary.attention.call.recompute import RNGReplay, capture_autocast
from armillary.attention.call.token_chunks import at_tokens, chunks
from armillary.core import label

TokenFunction = Callable[..., Tensor]
"""From tensors [B, T, ...] to [B, T, E], each token by itself. It is run again in backward.

Some inputs, and the result, may have `gathered_ranks` tokens for each one of the first input's. Those are interleaved
over as many ranks (`armillary.core.collectives.interleaved`), and the function gathers or scatters them. The last
of the first input's may have fewer.
"""


def in_chunks(
    function: TokenFunction,
    inputs: Sequence[Tensor],
    module: nn.Module,
    chunk: int | None = None,
    gathered_ranks: int = 1,
) -> Tensor:
    """Computes `function(*inputs)`, differentiably; keeps only the inputs and recomputes the rest, chunk by chunk.

    Args:
        inputs: [B, T, ...] each, or [B, T * gathered_ranks, ...].
        module: the owner of the parameters that `function` uses.
        chunk: tokens at a time; by default that of `armillary.attention.call.token_chunks`.
    """
    call = function, module, chunk, gathered_ranks, len(inputs)
    return cast(Tensor, cast(Any, ChunkedFunction).apply(*call, *inputs, *trained(module)))


def forward(
    function: TokenFunction,
    inputs: Sequence[Tensor],
    draws: RNGReplay,
    chunk: int | None = None,
    into: Tensor | None = None,
    gathered_ranks: int = 1,
) -> Tensor:
    """Computes `function(*inputs)`, without autograd, chunk by chunk.

    Args:
        draws: random numbers (dropout), which `backward` draws again.
        into: the result's memory, which may be an input's: each chunk is read before it is overwritten.
    """
    total = inputs[0].shape[1]
    for tokens in chunks(total, chunk):
        with draws.at(tokens.start, inputs[0].device):
            y = function(*(part(x, tokens, total, gathered_ranks) for x in inputs))
        if into is None:
            each = y.shape[1] // max(1, tokens.stop - tokens.start)
            into = y.new_empty((y.shape[0], total * each, *y.shape[2:]))
        part(into, tokens, total, gathered_ranks).copy_(y)
        del y
    assert into is not None
    return into


def backward(
    function: TokenFunction,
    inputs: Sequence[Tensor],
    dy: Tensor,
    grads: Sequence[Tensor | None],
    totals: GradientSums,
    draws: RNGReplay,
    chunk: int | None = None,
    gathered_ranks: int = 1,
) -> None:
    """Recomputes `function`, chunk by chunk, and computes its gradients.

    Args:
        dy: [B, T, E].
        grads: the memory of each input's gradient; None for an input without one. It may be `dy` itself: each chunk
            is read before it is overwritten.
        totals: sums of parameters' gradients, to which these are added.
        draws: the random numbers of `forward`, `again`.
    """
    total = inputs[0].shape[1]
    for tokens in chunks(total, chunk):
        parts = [
            part(x, tokens, total, gathered_ranks).detach().requires_grad_(g is not None)
            for x, g in zip(inputs, grads, strict=True)
        ]
        with torch.enable_grad(), draws.at(tokens.start, dy.device):
            y = function(*parts)
        parameters = [part for part in parts if part.requires_grad]
        # A copy: the share of a parameter that is merely added is this very tensor, and dy may be overwritten below.
        dy_part, sources = part(dy, tokens, total, gathered_ranks).clone(), [*parameters, *totals.parameters]
        gradients: list[Tensor | None] = list(torch.autograd.grad(y, sources, dy_part, allow_unused=True))
        del y, dy_part, sources
        totals.add(gradients[len(parameters) :])
        for grad, gradient in zip((g for g in grads if g is not None), gradients, strict=False):
            if gradient is None:
                part(grad, tokens, total, gathered_ranks).zero_()
            else:
                part(grad, tokens, total, gathered_ranks).copy_(gradient)
        del parts, parameters, gradients


def part(x: Tensor, tokens: slice, total: int, gathered_ranks: int) -> Tensor:
    """Returns x at `tokens` of `total`; x has one entry for each token, or `gathered_ranks`."""
    each = 1 if x.shape[1] == total else gathered_ranks
    return at_tokens(x, slice(tokens.start * each, tokens.stop * each))


class ChunkedFunction(torch.autograd.Function):
    """A token-wise function that saves only its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        function: TokenFunction,
        module: nn.Module,
        chunk: int | None,
        gathered_ranks: int,
        count: int,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.function, ctx.module, ctx.cut, ctx.count = function, module, (chunk, gathered_ranks), count
        ctx.autocast, ctx.draws = capture_autocast(tensors[0].device.type), RNGReplay()
        ctx.save_for_backward(*tensors)
        with ctx.autocast():
            return forward(function, tensors[:count], ctx.draws, chunk, gathered_ranks=gathered_ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs: Sequence[Tensor] = ctx.saved_tensors[: ctx.count]
        needs_grad = ctx.needs_input_grad[5 : 5 + ctx.count]
        with label("gradients"):
            grads = [torch.empty_like(x) if need else None for x, need in zip(inputs, needs_grad, strict=True)]
        totals = GradientSums(trained(ctx.module))
        with ctx.autocast():
            backward(ctx.function, inputs, grad_outputs[0], grads, totals, ctx.draws.again(), *ctx.cut)
        return None, None, None, None, None, *grads, *totals.result()


def trained(module: nn.Module) -> list[Tensor]:
    """Returns the parameters that require a gradient, as they are now: FSDP swaps them between forward and backward."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
