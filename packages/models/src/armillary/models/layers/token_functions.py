"""Token-wise functions in chunks of tokens, so that intermediate results exist for one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from armillary.attention.internal import GradientSums, RNGReplay, capture_autocast
from armillary.core import label
from armillary.core.internal import at_tokens, chunks

# A function from tensors [B, T, ...] to [B, T, E] that computes each token independently. Backward calls it again.
#
# The first input has this rank's T tokens. Under tensor parallelism, other inputs and the result may have the tokens of
# all ranks, `gathered_ranks` for each token of the first input (other inputs without padding, so fewer for the last
# one). The function gathers or scatters these interleaved tokens itself (`all_gather_interleaved`).
TokenFunction = Callable[..., Tensor]


def in_chunks(
    function: TokenFunction,
    inputs: Sequence[Tensor],
    module: nn.Module,
    chunk: int | None = None,
    gathered_ranks: int = 1,
) -> Tensor:
    """Computes `function(*inputs)` with autograd, in chunks. Saves only its inputs; backward recomputes each chunk.

    Args:
        inputs: [B, T, ...] each, or [B, T * gathered_ranks, ...].
        module: the module whose parameters `function` uses.
        chunk: number of tokens in a chunk; by default chosen by `armillary.core.token_chunks`.
        gathered_ranks: see `TokenFunction`.

    Raises:
        ValueError: `chunk` is below 1.
    """
    call = function, module, chunk, gathered_ranks, len(inputs)
    return cast(Tensor, cast(Any, ChunkedFunction).apply(*call, *inputs, *trained_parameters(module)))


def forward_in_chunks(
    function: TokenFunction,
    inputs: Sequence[Tensor],
    draws: RNGReplay,
    chunk: int | None = None,
    target: Tensor | None = None,
    gathered_ranks: int = 1,
) -> Tensor:
    """Computes `function(*inputs)`, without autograd, chunk by chunk. `target` is memory for the result."""
    token_count = inputs[0].shape[1]
    for tokens in chunks(token_count, chunk):
        # `draws` records the state of the random number generators, so that backward draws the same numbers (dropout).
        with draws.at(tokens.start, inputs[0].device):
            y = function(*(chunk_of(x, tokens, token_count, gathered_ranks) for x in inputs))
        if target is None:
            width = y.shape[1] // max(1, tokens.stop - tokens.start)  # tokens of the result per token: 1 or R
            target = y.new_empty((y.shape[0], token_count * width, *y.shape[2:]))
        # `target` may be the memory of an input, of which this chunk has been read.
        chunk_of(target, tokens, token_count, gathered_ranks).copy_(y)
        del y  # frees it before the next chunk is computed
    assert target is not None
    return target


def backward_in_chunks(
    function: TokenFunction,
    inputs: Sequence[Tensor],
    dy: Tensor,
    grads: Sequence[Tensor | None],
    totals: GradientSums,
    draws: RNGReplay,
    chunk: int | None = None,
    gathered_ranks: int = 1,
) -> None:
    """Recomputes `function` chunk by chunk. Writes the gradients of inputs to `grads`, and adds others to `totals`."""
    # An input that needs no gradient has None in `grads`. One of `grads` may be the memory of `dy`.
    token_count = inputs[0].shape[1]
    for tokens in chunks(token_count, chunk):
        chunk_inputs = [
            chunk_of(x, tokens, token_count, gathered_ranks).detach().requires_grad_(g is not None)
            for x, g in zip(inputs, grads, strict=True)
        ]
        with torch.enable_grad(), draws.at(tokens.start, dy.device):
            y = function(*chunk_inputs)
        trained_inputs = [x for x in chunk_inputs if x.requires_grad]
        # A copy, because autograd returns `chunk_dy` itself as the gradient of an input that is merely added (a
        # residual), and the memory of dy may be one of `grads`, overwritten below.
        chunk_dy = chunk_of(dy, tokens, token_count, gathered_ranks).clone()
        sources = [*trained_inputs, *totals.parameters]
        gradients: list[Tensor | None] = list(torch.autograd.grad(y, sources, chunk_dy, allow_unused=True))
        del y, chunk_dy, sources
        # The gradients of the inputs come first, then those of the parameters.
        totals.add(gradients[len(trained_inputs) :])
        for grad, gradient in zip((g for g in grads if g is not None), gradients, strict=False):
            if gradient is None:
                chunk_of(grad, tokens, token_count, gathered_ranks).zero_()
            else:
                chunk_of(grad, tokens, token_count, gathered_ranks).copy_(gradient)
        del chunk_inputs, trained_inputs, gradients


def chunk_of(x: Tensor, tokens: slice, token_count: int, gathered_ranks: int) -> Tensor:
    """Returns a view of x [B, token_count, ...] or [B, token_count * gathered_ranks, ...] at a chunk's tokens."""
    width = 1 if x.shape[1] == token_count else gathered_ranks
    return at_tokens(x, slice(tokens.start * width, tokens.stop * width))


class ChunkedFunction(torch.autograd.Function):
    """The autograd function of `in_chunks`. The first `count` of `tensors` are inputs, the others parameters."""

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
            return forward_in_chunks(function, tensors[:count], ctx.draws, chunk, gathered_ranks=gathered_ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs: Sequence[Tensor] = ctx.saved_tensors[: ctx.count]
        needs_grad = ctx.needs_input_grad[5 : 5 + ctx.count]
        with label("gradients"):
            grads = [torch.empty_like(x) if need else None for x, need in zip(inputs, needs_grad, strict=True)]
        totals = GradientSums(trained_parameters(ctx.module))
        with ctx.autocast():
            backward_in_chunks(ctx.function, inputs, grad_outputs[0], grads, totals, ctx.draws.restart(), *ctx.chunking)
        return None, None, None, None, None, *grads, *totals.result()


def trained_parameters(module: nn.Module) -> list[Tensor]:
    """Returns the module's current parameters that require a gradient. FSDP swaps them between forward and backward."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
