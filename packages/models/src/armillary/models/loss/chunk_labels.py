"""Labels of a chunk of tokens, one per token or several with weights: selects their logits, computes d(logits).

Letters: C tokens of a chunk, m labels, R ranks of the axis, V_r rows of the vocabulary on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from armillary.core import LabelTriples
from armillary.models.layers.interleaved import pad_to_multiple
from armillary.models.loss.vocabulary_shard import VocabularyShard


class ChunkLabels(Protocol):
    """The labels of C tokens.

    weights: [C, 1], the sum of the weights of a token's labels; bool if each token has at most one label.
    """

    @property
    def weights(self) -> Tensor: ...

    def logits_of(self, logits: Tensor) -> Tensor:
        """Returns the weighted sum of a token's label logits, [C, V_r] -> [C, 1]; 0 for labels of another rank."""
        ...

    def logits_gradient(self, softmax: Tensor, factor: Tensor, gradient: Tensor) -> None:
        """Writes the gradient of cross entropy by the logits: softmax [C, V_r] times factor [C, 1], minus weights.

        `factor` has the weight of each token, the z-loss, and the softmax's normalization over all ranks. Weights are
        subtracted in the columns of their labels. `softmax` is overwritten; `gradient` may share its
        memory, or have another dtype.
        """
        ...


class TokenLabels(Protocol):
    """The labels of the tokens of all ranks of an axis, padded to a multiple of the ranks."""

    @property
    def count(self) -> Tensor:
        """Returns the number of labels, or the sum of their weights: a scalar."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T): rows, and padded tokens of each."""
        ...

    def check(self, rows: VocabularyShard) -> None:
        """Raises an error for labels outside of the vocabulary."""
        ...

    def any_of(self, chunk: slice) -> bool:
        """Returns False only if no token of the chunk has a label on any rank: then the chunk is skipped."""
        ...

    def of_chunk(self, chunk: slice, rows: VocabularyShard, dtype: torch.dtype) -> ChunkLabels:
        """Returns the labels of these tokens of every rank, rank by rank, with weights in `dtype`."""
        ...


def token_labels(labels: Tensor | LabelTriples, ignore: int, ranks: int = 1) -> TokenLabels:
    """Returns labels by chunk, from [B, T] or (position, label, weight); tokens are interleaved over R ranks."""
    if isinstance(labels, LabelTriples):
        return MultiLabels.of(labels, ranks)
    if labels.is_floating_point() or labels.ndim != 2:
        raise ValueError(f"labels must be integers [B, T]; got {labels.dtype} {tuple(labels.shape)}")
    padded = pad_to_multiple(labels, ranks, ignore)
    return SingleLabels((len(padded), padded.shape[1]), (labels != ignore).sum(), padded, ignore, ranks)


def gathered_index(positions: Tensor, chunk: slice, ranks: int) -> Tensor:
    """Converts positions in the whole sequence to indices in a chunk that was gathered from R ranks.

    Tokens are interleaved: position i R + r is token i of rank r. The gathered chunk is ordered by rank.
    """
    offsets = positions - chunk.start * ranks
    return offsets % ranks * (chunk.stop - chunk.start) + offsets // ranks


# -- one label per token ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SingleLabels:
    """One label, or `ignore`, for each token [B, T]."""

    shape: tuple[int, int]
    count: Tensor
    labels: Tensor
    ignore: int
    ranks: int

    def check(self, rows: VocabularyShard) -> None:
        if not rows.alone:
            # `gather` raises for a label outside of the vocabulary, as an unsharded loss does: on every rank, without a
            # host sync. The full vocabulary is one element of memory, expanded.
            labels = self.labels.flatten()
            labels.new_zeros(1).expand(rows.total_rows).gather(0, labels.where(labels != self.ignore, 0))

    def any_of(self, chunk: slice) -> bool:
        return True

    def of_chunk(self, chunk: slice, rows: VocabularyShard, dtype: torch.dtype) -> SingleChunkLabels:
        # Position i R + r is token i of rank r: [tokens, R], transposed to rank order as in `gathered_index`.
        labels = self.labels.reshape(-1, self.ranks)[chunk].T.flatten().long().unsqueeze(1)
        valid = labels != self.ignore
        return SingleChunkLabels(valid, *rows.local_columns(labels, valid))


@dataclass(frozen=True)
class SingleChunkLabels:
    """One label for each of C tokens.

    Args:
        weights: bool [C, 1], False for ignored labels.
        columns: [C, 1], the label's column of this rank's logits; 0 if another rank has it.
        is_local: bool [C, 1], True for a valid label whose column this rank has.
    """

    weights: Tensor
    columns: Tensor
    is_local: Tensor

    def logits_of(self, logits: Tensor) -> Tensor:
        return logits.gather(1, self.columns).where(self.is_local, 0)

    def logits_gradient(self, softmax: Tensor, factor: Tensor, gradient: Tensor) -> None:
        at_labels = softmax.gather(1, self.columns) * factor - self.is_local.to(softmax.dtype)
        # On the CPU, `mul` into another dtype allocates a temporary, and so does a scatter in bfloat16. CUDA casts.
        product = torch.mul(softmax, factor, out=softmax if softmax.device.type == "cpu" else gradient)
        # Scattered instead of added with atomics: deterministic on a GPU.
        product.scatter_(1, self.columns, at_labels.to(product.dtype))
        if product is not gradient:
            gradient.copy_(product)


# -- several labels ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MultiLabels:
    """Label triples of tokens that are padded to a multiple of the ranks. `positions` count padding, `triples` do not.

    `triples` has host copies of positions, so that chunks are looked up without a device sync.
    """

    shape: tuple[int, int]
    positions: Tensor
    triples: LabelTriples
    ranks: int

    @classmethod
    def of(cls, triples: LabelTriples, ranks: int) -> MultiLabels:
        rows, tokens = triples.shape
        padding = -tokens % ranks  # at the end of each row, so that row b moves by b * padding positions
        positions = triples.positions + triples.positions // max(tokens, 1) * padding
        return cls((rows, tokens + padding), positions, triples, ranks)

    @property
    def count(self) -> Tensor:
        return self.triples.weights.sum()

    def check(self, rows: VocabularyShard) -> None:
        if self.triples.largest >= rows.total_rows:
            raise ValueError(f"label {self.triples.largest} is not in the vocabulary of {rows.total_rows} tokens")

    def any_of(self, chunk: slice) -> bool:
        triples = self._within(chunk)
        return triples.stop > triples.start

    def of_chunk(self, chunk: slice, rows: VocabularyShard, dtype: torch.dtype) -> MultiChunkLabels:
        in_chunk = self._within(chunk)
        labels, weights = self.triples.labels[in_chunk], self.triples.weights[in_chunk].to(dtype)
        tokens = gathered_index(self.positions[in_chunk], chunk, self.ranks)
        # All labels of a token count in its total, whichever rank has their columns.
        total = weights.new_zeros((chunk.stop - chunk.start) * self.ranks).index_put_(
            (tokens,), weights, accumulate=True
        )
        columns, is_local = rows.local_columns(labels, labels >= 0)
        return MultiChunkLabels(total.unsqueeze(1), tokens, columns, weights.where(is_local, 0))

    def _within(self, chunk: slice) -> slice:
        """Returns the slice of the triples of tokens `chunk` of each rank."""
        bounds = [self._unpad(edge * self.ranks) for edge in (chunk.start, chunk.stop)]
        return self.triples.within(*bounds)

    def _unpad(self, position: int) -> int:
        """Converts a position that counts padding to one that does not."""
        tokens = self.triples.shape[1]
        row, index = divmod(position, max(self.shape[1], 1))
        return row * tokens + min(index, tokens)


@dataclass(frozen=True)
class MultiChunkLabels:
    """The m labels of a chunk of C tokens. Sums use index_put_, which is deterministic on a GPU.

    Args:
        weights: [C, 1], the sum of the weights of each token's labels.
        tokens: [m], the token of each label, as `gathered_index`.
        columns: [m], the label's column of this rank's logits.
        local_weights: [m], the label's weight; 0 if another rank has the column.
    """

    weights: Tensor
    tokens: Tensor
    columns: Tensor
    local_weights: Tensor

    def logits_of(self, logits: Tensor) -> Tensor:
        # `where`, because 0 times an infinite logit would be NaN.
        logits_of_labels = (logits[self.tokens, self.columns] * self.local_weights).where(self.local_weights != 0, 0)
        return logits.new_zeros(len(logits)).index_put_((self.tokens,), logits_of_labels, accumulate=True).unsqueeze(1)

    def logits_gradient(self, softmax: Tensor, factor: Tensor, gradient: Tensor) -> None:
        softmax.mul_(factor).index_put_((self.tokens, self.columns), -self.local_weights, accumulate=True)
        if gradient is not softmax:
            gradient.copy_(softmax)
