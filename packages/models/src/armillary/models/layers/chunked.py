"""Token-wise functions in chunks of tokens, so that intermediate results never exist for all tokens at once."""

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
"""From tensors [B, T, ...] to [B, T, E], independently per token. Rerun in backward.

Under tensor parallelism some inputs, and the result, may have `gathered_ranks` tokens per token of the first input:
tokens interleaved over that many ranks (`armillary.models.layers.interleaved`), which the function gathers or
scatters. The last token of the first input may have fewer.
"""


def in_chunks(
    function: TokenFunction,
    inputs: Sequence[Tensor],
    module: nn.Module,
    chunk: int | None = None,
    gathered_ranks: int = 1,
) -> Tensor:
    """Computes `function(*inputs)`, differentiably. Saves only the inputs; backward recomputes chunk by chunk.

    Args:
        inputs: [B, T, ...] each, or [B, T * gathered_ranks, ...].
        module: the owner of the parameters that `function` uses.
        chunk: tokens at a time; by default as in `armillary.attention.call.token_chunks`.
    """
    call = function, module, chunk, gathered_ranks, len(inputs)
    return cast(Tensor, cast(Any, ChunkedFunction).apply(*call, *inputs, *trained_parameters(module)))


def forward(
    function: TokenFunction,
    inputs: Sequence[Tensor],
    draws: RNGReplay,
    chunk: int | None = None,
    target: Tensor | None = None,
    gathered_ranks: int = 1,
) -> Tensor:
    """Computes `function(*inputs)`, without autograd, chunk by chunk.

    Args:
        draws: random numbers (dropout), which `backward` draws again.
        target: memory for the result, which may be an input's: each chunk is read before it is overwritten.
    """
    token_count = inputs[0].shape[1]
    for tokens in chunks(token_count, chunk):
        with draws.at(tokens.start, inputs[0].device):
            y = function(*(chunk_of(x, tokens, token_count, gathered_ranks) for x in inputs))
        if target is None:
            width = y.shape[1] // max(1, tokens.stop - tokens.start)
            target = y.new_empty((y.shape[0], token_count * width, *y.shape[2:]))
        chunk_of(target, tokens, token_count, gathered_ranks).copy_(y)
        del y  # before the next chunk is computed
    assert target is not None
    return target


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
        grads: memory for each input's gradient; None for an input without one. It may be `dy` itself: each chunk is
            read before it is overwritten.
        totals: sums to which the parameters' gradients are added.
        draws: replays the random numbers of `forward`.
    """
    token_count = inputs[0].shape[1]
    for tokens in chunks(token_count, chunk):
        chunk_inputs = [
            chunk_of(x, tokens, token_count, gathered_ranks).detach().requires_grad_(g is not None)
            for x, g in zip(inputs, grads, strict=True)
        ]
        with torch.enable_grad(), draws.at(tokens.start, dy.device):
            y = function(*chunk_inputs)
        parameters = [x for x in chunk_inputs if x.requires_grad]
        # A copy: the gradient of an input that is merely added (a residual) is dy itself, and dy's memory may be one of
        # `grads`, overwritten below.
        dy_part, sources = chunk_of(dy, tokens, token_count, gathered_ranks).clone(), [*parameters, *totals.parameters]
        gradients: list[Tensor | None] = list(torch.autograd.grad(y, sources, dy_part, allow_unused=True))
        del y, dy_part, sources
        totals.add(gradients[len(parameters) :])
        for grad, gradient in zip((g for g in grads if g is not None), gradients, strict=False):
            if gradient is None:
                chunk_of(grad, tokens, token_count, gathered_ranks).zero_()
            else:
                chunk_of(grad, tokens, token_count, gathered_ranks).copy_(gradient)
        del chunk_inputs, parameters, gradients


def chunk_of(x: Tensor, tokens: slice, token_count: int, gathered_ranks: int) -> Tensor:
    """Returns x at `tokens` of `token_count`; x has one entry per token, or `gathered_ranks`."""
    width = 1 if x.shape[1] == token_count else gathered_ranks
    return at_tokens(x, slice(tokens.start * width, tokens.stop * width))


class ChunkedFunction(torch.autograd.Function):
    """A token-wise function in chunks that saves only its inputs."""

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
        ctx.function, ctx.module, ctx.chunking, ctx.count = function, module, (chunk, gathered_ranks), count
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
        totals = GradientSums(trained_parameters(ctx.module))
        with ctx.autocast():
            backward(ctx.function, inputs, grad_outputs[0], grads, totals, ctx.draws.restart(), *ctx.chunking)
        return None, None, None, None, None, *grads, *totals.result()


def trained_parameters(module: nn.Module) -> list[Tensor]:
    """Returns the parameters that require a gradient, right now: FSDP swaps them between forward and backward."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
