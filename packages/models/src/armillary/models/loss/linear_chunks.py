"""`linear_token_loss` chunk by chunk: a chunk's losses, and its gradients in the same pass.

Letters: this rank has t of T tokens, c of the C tokens of a chunk, and V_r of the V rows of the head's weight. On one
rank t = T, c = C and V_r = V.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.attention.parts import chunks as token_chunks
from armillary.models.loss.chunk_labels import TokenLabels
from armillary.models.loss.cross_entropy import cross_entropy_, pad_empty_shard, scale
from armillary.models.loss.vocabulary_shard import VocabularyShard


class ChunkedLabels(Protocol):
    """Labels of (B, T) tokens of all ranks, with T padded to a multiple of the ranks."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def may_have_labels(self, chunk: slice) -> bool:
        """Returns False if the host knows, without a device sync, that no rank's tokens in `chunk` have a label."""
        ...


@dataclass(frozen=True)
class ChunkSpec:
    """A call's labels, their division into chunks, and the dtypes of products and sums.

    Args:
        chunk: number of tokens of all ranks in a chunk.
        dtype: dtype of the matmuls.
    """

    labels: ChunkedLabels
    chunk: int
    dtype: torch.dtype
    shard: VocabularyShard

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums."""
        return torch.promote_types(self.dtype, torch.float32)

    def token_slices(self) -> list[slice]:
        """Returns the slice of a rank's tokens for each chunk, without chunks that the host knows to have no labels."""
        slices = chunk_slices(self.labels.shape, self.chunk, self.shard.axis.size)
        return [tokens for tokens in slices if self.labels.may_have_labels(tokens)]


@dataclass(frozen=True)
class LinearLossSpec(ChunkSpec):
    """The options of a call, and the labels of all T tokens."""

    labels: TokenLabels
    z_loss: float


def chunk_slices(shape: tuple[int, int], chunk: int, ranks: int) -> list[slice]:
    """Returns the slice of a rank's tokens for each chunk.

    Args:
        shape: (B, T) of the tokens of all ranks, with T padded to a multiple of the ranks.
        chunk: number of tokens of all ranks in a chunk.
    """
    own_tokens = shape[0] * shape[1] // ranks
    return token_chunks(own_tokens, max(1, chunk // ranks)) if own_tokens else []


class LinearLoss(torch.autograd.Function):
    """The summed loss. Forward also computes the gradients; backward multiplies them by the upstream gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearLossSpec, needs_grad: Sequence[bool]
    ) -> Tensor:
        # A chunk's logits are freed in forward, so its gradients are computed while the logits exist.
        gradients = Gradients.empty(hidden, weight, spec.wide, needs_grad)
        matmul_weight, matmul_bias = weight.to(spec.dtype), None if bias is None else bias.to(spec.dtype)
        losses = hidden.new_zeros(len(hidden), dtype=spec.wide)
        for tokens, chunk_hidden in chunks(hidden, spec.token_slices(), spec.shard, spec.dtype):
            losses[tokens] = add_chunk(tokens, chunk_hidden, matmul_weight, matmul_bias, spec, gradients)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return spec.shard.total(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if x is None else scale(x, grads[0], dtype) for x, dtype in gradients), None, None


def chunks(
    hidden: Tensor, slices: Sequence[slice], shard: VocabularyShard, dtype: torch.dtype
) -> Generator[tuple[slice, Tensor]]:
    """Yields for each chunk the slice of this rank's tokens, and the hidden states [C, E] of all ranks' tokens.

    The next chunk is gathered while the caller computes the current one.
    """
    ranks = shard.axis.size
    gathers = (shard.gather(hidden[tokens], ranks * len(hidden[tokens]), dtype) for tokens in slices)
    next_gather = next(gathers, None)  # starts the first all-gather
    for tokens in slices:
        current = next_gather
        next_gather = next(gathers, None)  # in flight while the caller works on the current chunk
        assert current is not None
        yield tokens, current.wait()


def add_chunk(
    tokens: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearLossSpec, gradients: Gradients
) -> Tensor:
    """Returns the losses [c] of one chunk, and adds its gradients to `gradients`.

    A function of its own, so that its buffers are freed on return.

    Args:
        tokens: the slice of this rank's tokens.
        hidden: [C, E], the hidden states of all ranks' tokens.
    """
    logits = pad_empty_shard(F.linear(hidden, weight, bias))  # [C, V_r], to be overwritten by d(logits)
    needs_grad = not (gradients.hidden is gradients.weight is gradients.bias is None)
    losses = cross_entropy_(
        logits.to(spec.wide),
        logits,
        spec.labels.of_chunk(tokens, spec.shard, spec.wide),
        spec.shard,
        z_loss=spec.z_loss,
        gradient=logits if needs_grad else None,
    )
    if needs_grad:
        gradients.add(tokens, logits.narrow(1, 0, len(weight)), hidden, weight, spec.shard)
    return losses


@dataclass(frozen=True)
class Gradients:
    """Gradients of hidden [t, E] in its dtype, and of weight [V_r, E] and bias [V_r] in the dtype of sums.

    A field is None if its gradient is not needed.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def empty(cls, hidden: Tensor, weight: Tensor, wide: torch.dtype, needs_grad: Sequence[bool]) -> Gradients:
        return cls(
            torch.zeros_like(hidden) if needs_grad[0] else None,
            torch.zeros_like(weight, dtype=wide) if needs_grad[1] else None,
            weight.new_zeros(len(weight), dtype=wide) if needs_grad[2] else None,
        )

    def add(self, tokens: slice, dlogits: Tensor, hidden: Tensor, weight: Tensor, shard: VocabularyShard) -> None:
        """Adds a chunk's gradients.

        Args:
            tokens: the slice of this rank's tokens.
            dlogits: [C, V_r], the gradient of the chunk's logits, in the dtype of matmuls.
            hidden: [C, E], the hidden states of all ranks' tokens.
        """
        # The reduce-scatter over ranks is in flight while the weight's gradient is computed.
        write = None if self.hidden is None else shard.scatter(dlogits @ weight, self.hidden[tokens])
        if self.bias is not None:
            self.bias.add_(dlogits.sum(0, dtype=self.bias.dtype))
        if self.weight is not None and self.weight.is_cuda and dlogits.dtype != self.weight.dtype:
            # Tensor cores multiply in the narrow dtype and accumulate in the wide one, without a product in memory.
            torch.addmm(self.weight, dlogits.T, hidden, out_dtype=self.weight.dtype, out=self.weight)
        elif self.weight is not None:
            self.weight.addmm_(dlogits.T.to(self.weight.dtype), hidden.to(self.weight.dtype))
        if write is not None:
            write()
