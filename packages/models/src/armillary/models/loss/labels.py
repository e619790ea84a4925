"""The labels of tokens, one per token or several with weights, and those of a chunk: their logits and gradients.

Letters: C tokens of a chunk, m labels in a chunk, R ranks of the axis. V_r rows of the head's weight are on this rank,
so a rank's logits have V_r columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.core import LabelTriples
from armillary.core.parts import check_local
from armillary.models.layers.interleaved import pad_to_multiple
from armillary.models.loss.vocabulary_shard import VocabularyShard


@dataclass(frozen=True)
class TokenLabels:
    """M labels of the tokens of all R ranks of an axis, in the order of their tokens. Each has a weight.

    A chunk is a slice of each rank's tokens, the same slice on every rank.

    Args:
        shape: (B, T), rows and tokens of each. Positions count the tokens of rows padded to a multiple of R tokens.
        ranks: R, over which tokens are interleaved: position i R + r is token i of rank r.
        labels: int64 [M].
        weights: [M], float64, or bool: False for labels that are ignored.
        positions: [M], the position of the token that predicts each label. None for one label per token, label i for
            position i: padding has ignored labels.
        host_positions: the positions on the CPU, so that the labels of a chunk are found without a device sync.
        order: [M], the index of each label in the caller's order, where that is not the order of positions.
        largest: the largest label if the host knows it, or -1.
    """

    shape: tuple[int, int]
    ranks: int
    labels: Tensor
    weights: Tensor
    positions: Tensor | None = None
    host_positions: Tensor | None = None
    order: Tensor | None = None
    largest: int = -1

    @classmethod
    def of(cls, labels: Tensor | LabelTriples, ignore: int, ranks: int = 1) -> TokenLabels:
        """Returns the labels of a loss.

        Args:
            labels: integers [B, T], or `LabelTriples`.
            ignore: the value that marks a token without a label.

        Raises:
            ValueError: labels are not a local tensor of integers [B, T].
        """
        if isinstance(labels, LabelTriples):
            tokens = labels.shape[1]
            padding = -tokens % ranks  # at the end of each row, so that the tokens of row b move by b * padding
            host, positions = (x + x // max(tokens, 1) * padding for x in (labels.host_positions, labels.positions))
            return cls(labels.shape, ranks, labels.labels, labels.weights, positions, host, largest=labels.largest)
        check_integers("labels", labels, "[B, T]", 2)
        flat = pad_to_multiple(labels, ranks, ignore).flatten().long()
        return cls((labels.shape[0], labels.shape[1]), ranks, flat, flat != ignore)

    @classmethod
    def at_positions(
        cls, labels: Tensor, positions: Tensor, ignore: int, shape: tuple[int, int], ranks: int
    ) -> TokenLabels:
        """Returns labels [M] of tokens `positions` [M], in any order, of B rows of T tokens, a multiple of R.

        Raises:
            ValueError: labels or positions are not local tensors of integers [M], or a position is not one of the B T.
        """
        check_integers("labels", labels, "[M] beside positions", 1)
        check_integers("positions", positions, f"[M] like labels {tuple(labels.shape)}", 1)
        if positions.shape != labels.shape:
            raise ValueError(f"positions {tuple(positions.shape)} and labels {tuple(labels.shape)} must be [M] each")
        host, order = positions.detach().cpu().long().sort(stable=True)
        if len(host) and not 0 <= int(host[0]) <= int(host[-1]) < shape[0] * shape[1]:
            raise ValueError(
                f"positions run from {int(host[0])} to {int(host[-1])}; {shape[0]} rows of {shape[1]} tokens have 0 to "
                f"{shape[0] * shape[1] - 1}"
            )
        order = order.to(labels.device)
        in_order = labels[order].long()
        return cls(shape, ranks, in_order, in_order != ignore, host.to(labels.device), host, order)

    @property
    def count(self) -> Tensor:
        """The number of labels that are not ignored, or the sum of the weights: a scalar."""
        return self.weights.sum()

    def check(self, vocabulary: int) -> None:
        """Raises an error for labels outside of the vocabulary, the same on every rank, without a device sync."""
        if self.largest >= vocabulary:
            raise ValueError(f"label {self.largest} is not in the vocabulary of {vocabulary} tokens")
        # `gather` checks its indices. The vocabulary that it reads is one element of memory, expanded.
        self.labels.new_zeros(1).expand(vocabulary).gather(0, self.labels.where(self.weights != 0, 0))

    def indices(self, chunk: slice) -> slice:
        """Returns the slice of the M labels whose tokens are in the chunk, on any rank."""
        # Tokens are interleaved: tokens a..b of all R ranks are the positions a R..b R.
        bounds = chunk.start * self.ranks, chunk.stop * self.ranks
        if self.host_positions is None:
            return slice(*bounds)
        return slice(*torch.searchsorted(self.host_positions, torch.tensor(bounds)).tolist())

    def of_chunk(self, chunk: slice, shard: VocabularyShard, dtype: torch.dtype) -> ChunkLabels:
        """Returns the labels of the chunk's tokens of all ranks, with weights in `dtype`."""
        indices, size = self.indices(chunk), chunk.stop - chunk.start
        labels, weights = self.labels[indices], self.weights[indices]
        if self.positions is None:
            offsets = torch.arange(size * self.ranks, device=labels.device)
        else:
            offsets = self.positions[indices] - chunk.start * self.ranks
        # A gathered chunk has the tokens of rank 0, then those of rank 1, and so on.
        tokens = offsets % self.ranks * size + offsets // self.ranks
        columns, is_local = shard.local_columns(labels, weights != 0)
        one_per_token = self.positions is None
        return ChunkLabels(indices, size * self.ranks, tokens, columns, is_local, weights.to(dtype), one_per_token)

    def in_caller_order(self, values: Tensor) -> Tensor:
        """Returns values [M] in the caller's order and shape; 0 where a label is ignored."""
        values = values.where(self.weights != 0, 0)
        if self.order is not None:
            return torch.empty_like(values).index_put((self.order,), values)
        return values.view(self.shape[0], -1)[:, : self.shape[1]]


@dataclass(frozen=True)
class ChunkLabels:
    """The m labels of a chunk of C tokens. Sums use `index_put_`: unlike `scatter_add_` it is deterministic on a GPU.

    Args:
        indices: the slice of the `TokenLabels` that these labels are.
        count: C.
        tokens: [m], the token of each label: its index in the gathered chunk.
        columns: [m], the label's column of this rank's logits; 0 if another rank has it.
        is_local: bool [m], True for a label with a weight whose column this rank has.
        weights: [m].
        one_per_token: True if each token has exactly one label, with a weight or without.
    """

    indices: slice
    count: int
    tokens: Tensor
    columns: Tensor
    is_local: Tensor
    weights: Tensor
    one_per_token: bool

    def by_token(self, values: Tensor) -> Tensor:
        """Returns the sum of each token's labels' values, [m] -> [C, 1]."""
        sums = values.new_zeros(self.count)
        # Only where tokens repeat: to accumulate, a GPU sorts the indices.
        return sums.index_put_((self.tokens,), values, accumulate=not self.one_per_token).unsqueeze(1)

    def logits_of(self, logits: Tensor) -> Tensor:
        """Returns the logit of each label, [C, V_r] -> [m]; 0 if another rank has its column."""
        return logits.view(-1).gather(0, self._elements(logits)).where(self.is_local, 0)

    def logits_gradient(self, softmax: Tensor, factor: Tensor, gradient: Tensor) -> None:
        """Writes d(logits) of the cross entropy to `gradient` [C, V_r]: softmax times factor, minus weights.

        The weight of each label is subtracted in the label's column.

        Args:
            softmax: [C, V_r], overwritten.
            factor: [C, 1], the weights `by_token`. In `cross_entropy_` also times 1 + 2 z lse, for the z-loss, and
                times the probability of this rank's rows, because `softmax` is over these rows alone there.
            gradient: may share the memory of `softmax`, or have another dtype.
        """
        elements, weights = self._elements(softmax), self.weights.where(self.is_local, 0)
        if self.one_per_token:
            at_labels = softmax.view(-1).gather(0, elements) * factor[self.tokens, 0] - weights
            # On the CPU, `mul` with an output of another dtype allocates a temporary, and so does a scatter in
            # bfloat16, so both run in the memory of `softmax` there. On CUDA the kernel of `mul` casts as it writes.
            product = torch.mul(softmax, factor, out=softmax if softmax.device.type == "cpu" else gradient)
            product.view(-1).scatter_(0, elements, at_labels.to(product.dtype))
        else:
            product = softmax.mul_(factor)
            product.view(-1).index_put_((elements,), -weights, accumulate=True)
        if product is not gradient:
            gradient.copy_(product)

    def _elements(self, logits: Tensor) -> Tensor:
        """Returns the index of each label's element of the flattened logits, [m]."""
        return self.tokens * logits.shape[1] + self.columns


def check_integers(name: str, x: Tensor, accepted: str, ndim: int) -> None:
    """Raises ValueError unless `x` is a local tensor of integers with `ndim` dims, which `accepted` describes."""
    check_local(name, x)
    if x.is_floating_point() or x.ndim != ndim:
        raise ValueError(f"{name} must be integers {accepted}; got {x.dtype} {tuple(x.shape)}")
