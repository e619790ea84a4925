"""Labels of a chunk of tokens, one each or any number with weights: their logits, and the gradient of all logits.

Letters: C tokens of a chunk, m labels, V_r rows of the vocabulary on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from armillary.core.collectives.interleaved import pad_to_multiple
from armillary.core.labels import LabelTriples
from armillary.models.loss.vocabulary_shard import VocabularyShard


class ChunkLabels(Protocol):
    """The labels of C tokens.

    weights: [C, 1], the sum of the weights of a token's labels; booleans if it is 0 or 1.
    """

    @property
    def weights(self) -> Tensor: ...

    def chosen(self, logits: Tensor) -> Tensor:
        """Returns the weighted sum of the labels' logits [C, V_r], [C, 1]; labels of other ranks count 0."""
        ...

    def logits_gradient(self, softmax: Tensor, factor: Tensor, gradient: Tensor) -> None:
        """Writes softmax [C, V_r] times factor [C, 1], minus the labels' weights, to `gradient`.

        `softmax` is overwritten; `gradient` may share its memory, or have another dtype.
        """
        ...


class TokenLabels(Protocol):
    """The labels of T tokens of all ranks of an axis, padded to a multiple of the ranks."""

    @property
    def count(self) -> Tensor:
        """Returns the number of labels, or the sum of their weights: a scalar."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T): rows, and padded tokens of each."""
        ...

    def check(self, rows: VocabularyShard) -> None:
        """Refuses labels outside of the vocabulary."""
        ...

    def any_of(self, part: slice) -> bool:
        """False if the host knows that there are no labels among these tokens of each rank."""
        ...

    def of_chunk(self, part: slice, rows: VocabularyShard, dtype: torch.dtype) -> ChunkLabels:
        """Returns the labels of these tokens of each rank, rank by rank, in the dtype of sums."""
        ...


def token_labels(labels: Tensor | LabelTriples, ignore: int, ranks: int = 1) -> TokenLabels:
    """Returns the labels [B, T], or triples, of tokens of which each rank has every R-th."""
    if isinstance(labels, LabelTriples):
        return SeveralEach.of(labels, ranks)
    if labels.is_floating_point() or labels.ndim != 2:
        raise ValueError(f"labels must be integers [B, T]; got {labels.dtype} {tuple(labels.shape)}")
    return OneEach((labels != ignore).sum(), pad_to_multiple(labels, ranks, ignore), ignore, ranks)


# -- one label to a token ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneEach:
    """One label, or `ignore`, for each token [B, T]."""

    count: Tensor
    labels: Tensor
    ignore: int
    ranks: int

    @property
    def shape(self) -> tuple[int, int]:
        rows, tokens = self.labels.shape
        return rows, tokens

    def check(self, rows: VocabularyShard) -> None:
        rows.check_labels(self.labels, self.ignore)

    def any_of(self, part: slice) -> bool:
        return True

    def of_chunk(self, part: slice, rows: VocabularyShard, dtype: torch.dtype) -> OneOfChunk:
        labels = self.labels.reshape(-1, self.ranks)[part].T.flatten().long().unsqueeze(1)
        valid = labels != self.ignore
        return OneOfChunk(valid, *rows.find(labels, valid))


@dataclass(frozen=True)
class OneOfChunk:
    """Columns [C, 1] of the labels' logits, and a mask of those on this rank."""

    weights: Tensor
    places: Tensor
    here: Tensor

    def chosen(self, logits: Tensor) -> Tensor:
        return logits.gather(1, self.places).where(self.here, 0)

    def logits_gradient(self, softmax: Tensor, factor: Tensor, gradient: Tensor) -> None:
        at_labels = softmax.gather(1, self.places) * factor - self.here.to(softmax.dtype)
        # On a GPU an op casts as it writes; on a CPU it first makes all of its result, and bfloat16's scatter does too.
        product = torch.mul(softmax, factor, out=softmax if softmax.device.type == "cpu" else gradient)
        # Scattered, and not added: the same on every run on a GPU.
        product.scatter_(1, self.places, at_labels.to(product.dtype))
        if product is not gradient:
            gradient.copy_(product)


# -- several ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeveralEach:
    """Triples, with positions among padded tokens; `host` has the original triples, for lookups without waiting."""

    shape: tuple[int, int]
    positions: Tensor
    triples: LabelTriples
    ranks: int

    @classmethod
    def of(cls, triples: LabelTriples, ranks: int) -> SeveralEach:
        rows, tokens = triples.shape
        padding = -tokens % ranks
        positions = triples.positions + triples.positions // max(tokens, 1) * padding
        return cls((rows, tokens + padding), positions, triples, ranks)

    @property
    def count(self) -> Tensor:
        return self.triples.weights.sum()

    def check(self, rows: VocabularyShard) -> None:
        if self.triples.largest >= rows.whole:
            raise ValueError(f"label {self.triples.largest} is not in the vocabulary of {rows.whole} tokens")

    def any_of(self, part: slice) -> bool:
        within = self._within(part)
        return within.stop > within.start

    def of_chunk(self, part: slice, rows: VocabularyShard, dtype: torch.dtype) -> SeveralOfChunk:
        within, size = self._within(part), len(range(*part.indices(self.shape[0] * self.shape[1] // self.ranks)))
        place = self.positions[within] - part.start * self.ranks
        labels, weights = self.triples.labels[within], self.triples.weights[within].to(dtype)
        tokens = place % self.ranks * size + place // self.ranks  # rank by rank
        total = weights.new_zeros(size * self.ranks).index_put_((tokens,), weights, accumulate=True)
        places, on_this_rank = rows.find(labels, labels >= 0)
        return SeveralOfChunk(total.unsqueeze(1), tokens, places, weights.where(on_this_rank, 0))

    def _within(self, part: slice) -> slice:
        """Returns a mask of the triples that lie on these tokens of each rank."""
        bounds = [self._unpadded(edge * self.ranks) for edge in (part.start, part.stop)]
        return self.triples.within(*bounds)

    def _unpadded(self, position: int) -> int:
        """Returns the number of tokens before this one."""
        tokens = self.triples.shape[1]
        row, place = divmod(position, max(self.shape[1], 1))
        return row * tokens + min(place, tokens)


@dataclass(frozen=True)
class SeveralOfChunk:
    """For each of m labels its token among the C, its column, and its weight, 0 if another rank has the column.

    Sums use index_put_, whose order on a GPU is the same in every run.
    """

    weights: Tensor
    tokens: Tensor
    places: Tensor
    each: Tensor

    def chosen(self, logits: Tensor) -> Tensor:
        # Where the weight is 0, so is the product, whatever the logit of another label.
        logits_of_labels = (logits[self.tokens, self.places] * self.each).where(self.each != 0, 0)
        return logits.new_zeros(len(logits)).index_put_((self.tokens,), logits_of_labels, accumulate=True).unsqueeze(1)

    def logits_gradient(self, softmax: Tensor, factor: Tensor, gradient: Tensor) -> None:
        softmax.mul_(factor).index_put_((self.tokens, self.places), -self.each, accumulate=True)
        if gradient is not softmax:
            gradient.copy_(softmax)
