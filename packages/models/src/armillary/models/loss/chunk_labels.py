"""Labels of a chunk of tokens, one per token or several with weights: selects their logits, computes d(logits).

Letters: C tokens of a chunk, m labels in a chunk, R ranks of the axis. V_r rows of the head's weight are on this rank,
so a rank's logits have V_r columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from armillary.core import LabelTriples
from armillary.core.parts import check_local
from armillary.models.layers.interleaved import pad_to_multiple
from armillary.models.loss.vocabulary_shard import VocabularyShard


class ChunkLabels(Protocol):
    """The labels of C tokens.

    weights: [C, 1], the sum of the weights of each token's labels; bool if tokens have at most one label each.
    """

    @property
    def weights(self) -> Tensor: ...

    def logits_of(self, logits: Tensor) -> Tensor:
        """Returns the sum over each token's labels of weight times logit: [C, V_r] -> [C, 1].

        A label whose column another rank has counts 0.
        """
        ...

    def logits_gradient(self, softmax: Tensor, factor: Tensor, gradient: Tensor) -> None:
        """Writes d(logits) of the cross entropy to `gradient` [C, V_r]: softmax times factor, minus weights.

        The weight of each label is subtracted in the label's column.

        Args:
            softmax: [C, V_r], overwritten.
            factor: [C, 1], each token's weight. In `cross_entropy_` also times 1 + 2 z lse, for the z-loss, and times
                the probability of this rank's rows, because `softmax` is over these rows alone there.
            gradient: may share the memory of `softmax`, or have another dtype.
        """
        ...


class TokenLabels(Protocol):
    """The labels of the tokens of all R ranks of an axis. Rows are padded to a multiple of R tokens.

    A chunk is a slice of each rank's tokens, the same slice on every rank.
    """

    @property
    def count(self) -> Tensor:
        """The number of labels, or the sum of their weights: a scalar."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T): the number of rows, and of tokens of a row with padding."""
        ...

    def check(self, shard: VocabularyShard) -> None:
        """Raises an error for labels outside of the vocabulary."""
        ...

    def may_have_labels(self, chunk: slice) -> bool:
        """Returns False if the host knows that no token of the chunk has a label on any rank: then it is skipped."""
        ...

    def of_chunk(self, chunk: slice, shard: VocabularyShard, dtype: torch.dtype) -> ChunkLabels:
        """Returns the labels of the chunk's tokens of all ranks, in rank order, with weights in `dtype`."""
        ...


def token_labels(labels: Tensor | LabelTriples, ignore: int, ranks: int = 1) -> TokenLabels:
    """Returns the labels as `TokenLabels`.

    Args:
        labels: integers [B, T], or `LabelTriples`.
        ignore: the value that marks a token without a label.
        ranks: R, over which tokens are interleaved.

    Raises:
        ValueError: labels are not a local tensor of integers [B, T].
    """
    if isinstance(labels, LabelTriples):
        return MultiLabels.of(labels, ranks)
    check_local("labels", labels)
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
    """One label, or `ignore`, for each token.

    Args:
        shape: (B, T), with rows padded to a multiple of R tokens.
        count: the number of labels that are not `ignore`, a scalar.
        labels: [B, T] of `shape`; padding has the label `ignore`.
        ranks: R.
    """

    shape: tuple[int, int]
    count: Tensor
    labels: Tensor
    ignore: int
    ranks: int

    def check(self, shard: VocabularyShard) -> None:
        if not shard.alone:
            # `gather` raises for a label outside of the vocabulary, as an unsharded loss does: on every rank, without a
            # host sync. The full vocabulary is one element of memory, expanded.
            labels = self.labels.flatten()
            labels.new_zeros(1).expand(shard.total_rows).gather(0, labels.where(labels != self.ignore, 0))

    def may_have_labels(self, chunk: slice) -> bool:
        return True

    def of_chunk(self, chunk: slice, shard: VocabularyShard, dtype: torch.dtype) -> SingleChunkLabels:
        # Position i R + r is token i of rank r: [tokens of a rank, R]. Transposed to rank order, as `gathered_index`.
        labels = self.labels.reshape(-1, self.ranks)[chunk].T.flatten().long().unsqueeze(1)
        valid = labels != self.ignore
        return SingleChunkLabels(valid, *shard.local_columns(labels, valid))


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
        # On the CPU, `mul` with an output of another dtype allocates a temporary, and so does a scatter in bfloat16, so
        # both run in the memory of `softmax` there. On CUDA the kernel of `mul` casts as it writes.
        product = torch.mul(softmax, factor, out=softmax if softmax.device.type == "cpu" else gradient)
        # The labels' columns are overwritten with a scatter: an add with atomics would not be deterministic on a GPU.
        product.scatter_(1, self.columns, at_labels.to(product.dtype))
        if product is not gradient:
            gradient.copy_(product)


# -- several labels ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MultiLabels:
    """Several labels per token, each with a weight.

    Args:
        shape: (B, T), with rows padded to a multiple of R tokens.
        positions: the position of each label among the B T tokens of `shape`, so padding counts.
        triples: as the caller passed them, with positions that do not count padding. They include a copy of the
            positions on the host, so that the labels of a chunk are found without a device sync.
        ranks: R.
    """

    shape: tuple[int, int]
    positions: Tensor
    triples: LabelTriples
    ranks: int

    @classmethod
    def of(cls, triples: LabelTriples, ranks: int) -> MultiLabels:
        rows, tokens = triples.shape
        padding = -tokens % ranks  # at the end of each row, so that the tokens of row b move by b * padding positions
        positions = triples.positions + triples.positions // max(tokens, 1) * padding
        return cls((rows, tokens + padding), positions, triples, ranks)

    @property
    def count(self) -> Tensor:
        return self.triples.weights.sum()

    def check(self, shard: VocabularyShard) -> None:
        if self.triples.largest >= shard.total_rows:
            raise ValueError(f"label {self.triples.largest} is not in the vocabulary of {shard.total_rows} tokens")

    def may_have_labels(self, chunk: slice) -> bool:
        triples = self._within(chunk)
        return triples.stop > triples.start

    def of_chunk(self, chunk: slice, shard: VocabularyShard, dtype: torch.dtype) -> MultiChunkLabels:
        in_chunk = self._within(chunk)
        labels, weights = self.triples.labels[in_chunk], self.triples.weights[in_chunk].to(dtype)
        tokens = gathered_index(self.positions[in_chunk], chunk, self.ranks)
        # All labels of a token count in the sum of its weights, whichever rank has their columns.
        total = weights.new_zeros((chunk.stop - chunk.start) * self.ranks).index_put_(
            (tokens,), weights, accumulate=True
        )
        columns, is_local = shard.local_columns(labels, labels >= 0)
        return MultiChunkLabels(total.unsqueeze(1), tokens, columns, weights.where(is_local, 0))

    def _within(self, chunk: slice) -> slice:
        """Returns the slice of the triples whose tokens are in the chunk, on any rank."""
        # Tokens are interleaved: tokens a..b of all R ranks are the positions a R..b R.
        first, last = (self._unpad(index * self.ranks) for index in (chunk.start, chunk.stop))
        return self.triples.within(first, last)

    def _unpad(self, position: int) -> int:
        """Converts a position that counts padding to one that does not."""
        tokens = self.triples.shape[1]
        row, index = divmod(position, max(self.shape[1], 1))
        return row * tokens + min(index, tokens)


@dataclass(frozen=True)
class MultiChunkLabels:
    """The m labels of a chunk of C tokens. Sums use `index_put_`: unlike `scatter_add_` it is deterministic on a GPU.

    Args:
        weights: [C, 1], the sum of the weights of each token's labels.
        tokens: [m], the token of each label: its index in the gathered chunk (`gathered_index`).
        columns: [m], the label's column of this rank's logits; 0 if another rank has it.
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
