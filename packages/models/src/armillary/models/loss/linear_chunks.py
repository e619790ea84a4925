"""The chunks of `linear_token_loss`: their losses, and gradients in the same pass.

Letters: t of T tokens are this rank's, c of a chunk's C. On one rank t = T and c = C.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.models.loss.chunk_labels import TokenLabels
from armillary.models.loss.cross_entropy import at_least_one, cross_entropy_
from armillary.models.loss.vocabulary_shard import VocabularyShard


@dataclass(frozen=True)
class LinearLossSpec:
    """The options of a call, and the labels of all T tokens."""

    labels: TokenLabels
    chunk: int
    dtype: torch.dtype  # of the matmuls
    z_loss: float
    vocabulary: VocabularyShard

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums."""
        return torch.promote_types(self.dtype, torch.float32)

    def parts(self) -> list[slice]:
        """Returns the hidden states that a rank takes at a time; no chunk that the host knows to have no labels."""
        parts = chunk_parts(self.labels.shape, self.chunk, self.vocabulary.axis.size)
        return [part for part in parts if self.labels.any_of(part)]


def chunk_parts(shape: tuple[int, int], chunk: int, ranks: int) -> list[slice]:
    """Returns the hidden states that a rank takes at a time, of `shape` (B, T) padded tokens of all ranks."""
    own_tokens, step = shape[0] * shape[1] // ranks, max(1, chunk // ranks)
    return [slice(start, min(start + step, own_tokens)) for start in range(0, own_tokens, step)]


def loss_and_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearLossSpec, wanted: Sequence[bool]
) -> tuple[Tensor, Gradients]:
    """Returns the sum, and its gradients by hidden [t, E], weight [V_r, E] and bias [V_r], where requested."""
    gradients = Gradients.room(hidden, weight, spec.wide, wanted)
    weight, bias = weight.to(spec.dtype), None if bias is None else bias.to(spec.dtype)
    losses = hidden.new_zeros(len(hidden), dtype=spec.wide)
    for part, gathered in chunks(hidden, spec.parts(), spec.vocabulary, spec.dtype):
        losses[part] = add_chunk(part, gathered, weight, bias, spec, gradients)
    return spec.vocabulary.total(losses), gradients


def chunks(
    hidden: Tensor, parts: Sequence[slice], vocabulary: VocabularyShard, dtype: torch.dtype
) -> Generator[tuple[slice, Tensor]]:
    """Yields chunks of hidden [t, E] and of all ranks' [C, E]. Each is gathered while the one before is computed."""
    ranks = vocabulary.axis.size
    moving = (vocabulary.gather(hidden[part], ranks * len(hidden[part]), dtype) for part in parts)
    ahead = next(moving, None)
    for part in parts:
        here = ahead
        ahead = next(moving, None)
        assert here is not None
        yield part, here.wait()


def add_chunk(
    part: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearLossSpec, gradients: Gradients
) -> Tensor:
    """Returns the losses [c] of one chunk, hidden [C, E]. A function of its own, so that its buffers are freed."""
    logits = at_least_one(F.linear(hidden, weight, bias))
    losses = cross_entropy_(
        logits.to(spec.wide),
        logits,
        spec.labels.of_chunk(part, spec.vocabulary, spec.wide),
        spec.vocabulary,
        z_loss=spec.z_loss,
        gradient=logits if gradients.wanted else None,
    )
    if gradients.wanted:
        gradients.add(part, logits.narrow(1, 0, len(weight)), hidden, weight, spec.vocabulary)
    return losses


@dataclass(frozen=True)
class Gradients:
    """Gradients by hidden [t, E], in its dtype, and by weight [V_r, E] and bias [V_r] in that of sums; None if not
    needed.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def room(cls, hidden: Tensor, weight: Tensor, wide: torch.dtype, wanted: Sequence[bool]) -> Gradients:
        return cls(
            torch.zeros_like(hidden) if wanted[0] else None,
            torch.zeros_like(weight, dtype=wide) if wanted[1] else None,
            weight.new_zeros(len(weight), dtype=wide) if wanted[2] else None,
        )

    @property
    def wanted(self) -> bool:
        """True if any gradient is needed."""
        return not (self.hidden is self.weight is self.bias is None)

    def add(self, part: slice, dlogits: Tensor, hidden: Tensor, weight: Tensor, vocabulary: VocabularyShard) -> None:
        """Adds a chunk's gradients: from those of its logits [C, V_r], in the dtype of matmuls."""
        write = None if self.hidden is None else vocabulary.scatter(dlogits @ weight, self.hidden[part])
        if self.bias is not None:
            self.bias.add_(dlogits.sum(0, dtype=self.bias.dtype))
        if self.weight is not None and self.weight.is_cuda and dlogits.dtype != self.weight.dtype:
            # Tensor cores multiply the narrow ones and add to the wide sum, without a product in between.
            torch.addmm(self.weight, dlogits.T, hidden, out_dtype=self.weight.dtype, out=self.weight)
        elif self.weight is not None:
            self.weight.addmm_(dlogits.T.to(self.weight.dtype), hidden.to(self.weight.dtype))
        if write is not None:
            write()
