"""Labels of tokens, one per token or several with weights, and the vocabulary, sharded over the ranks of an axis.

Letters: R ranks of the axis; others as in `token_loss.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import Axis, Collective, LabelTriples, start_all_gather, start_reduce_scatter, start_scatter_parts
from armillary.core.internal import check_local, dtensor
from armillary.models.layers.interleaved import pad_to_multiple


@dataclass(frozen=True)
class TokenLabels:
    """M labels of the tokens of all R ranks of an axis, in the order of their tokens. Each has a weight.

    A chunk is a slice of each rank's tokens, the same slice on every rank.
    """

    shape: tuple[int, int]  # (B, T); positions count the tokens of rows padded to a multiple of R tokens
    ranks: int  # R, over which tokens are interleaved: position i R + r is token i of rank r
    labels: Tensor  # int64 [M]
    weights: Tensor  # [M], float64, or bool: False for labels that are ignored
    # [M], the position of the token that predicts each label. None for one label per token, label i for position i:
    # padding has ignored labels.
    positions: Tensor | None = None
    host_positions: Tensor | None = None  # on the CPU: the labels of a chunk are found without a device sync
    order: Tensor | None = None  # [M], the index of each label in the caller's order, if that is not by position
    largest: int = -1  # the largest label if the host knows it

    @classmethod
    def of(cls, labels: Tensor | LabelTriples, ignore: int, ranks: int = 1) -> TokenLabels:
        """Returns the labels of a loss. Raises ValueError unless they are triples or local integers [B, T]."""
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
        """Returns labels [M] of tokens `positions` [M], in any order, of B rows of T tokens, a multiple of R."""
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

    def of_chunk(self, chunk: slice, indices: slice, shard: VocabularyShard, dtype: torch.dtype) -> ChunkLabels:
        """Returns the labels `indices` of the chunk's tokens of all ranks, with weights in `dtype`."""
        size = chunk.stop - chunk.start
        labels, weights = self.labels[indices], self.weights[indices]
        if self.positions is None:
            offsets = torch.arange(size * self.ranks, device=labels.device)
        else:
            offsets = self.positions[indices] - chunk.start * self.ranks
        # A gathered chunk has the tokens of rank 0, then those of rank 1, and so on.
        tokens = offsets % self.ranks * size + offsets // self.ranks
        columns = labels - shard.first
        is_local = (weights != 0) & (columns >= 0) & (columns < shard.rows)
        return ChunkLabels(
            indices,
            size * self.ranks,
            tokens,
            columns.where(is_local, 0),
            is_local,
            weights.to(dtype),
            one_per_token=self.positions is None,
        )

    def in_caller_order(self, values: Tensor) -> Tensor:
        """Returns values [M] in the caller's order and shape; 0 where a label is ignored."""
        values = values.where(self.weights != 0, 0)
        if self.order is not None:
            return torch.empty_like(values).index_put((self.order,), values)
        return values.view(self.shape[0], -1)[:, : self.shape[1]]


@dataclass(frozen=True)
class ChunkLabels:
    """The m labels of a chunk of C tokens."""

    indices: slice  # of the `TokenLabels`
    count: int  # C
    tokens: Tensor  # [m], the token of each label: its index in the gathered chunk
    columns: Tensor  # [m], the label's column of this rank's logits; 0 if another rank has it
    is_local: Tensor  # bool [m], True for a label with a weight whose column this rank has
    weights: Tensor  # [m]
    one_per_token: bool  # each token has exactly one label, with a weight or without

    # Sums use `index_put_`: unlike `scatter_add_` it is deterministic on a GPU.

    def by_token(self, values: Tensor) -> Tensor:
        """Returns the sum of each token's labels' values, [m] -> [C, 1]."""
        sums = values.new_zeros(self.count)
        # Only where tokens repeat: to accumulate, a GPU sorts the indices.
        return sums.index_put_((self.tokens,), values, accumulate=not self.one_per_token).unsqueeze(1)

    def logits_of(self, logits: Tensor) -> Tensor:
        """Returns the logit of each label, [C, V_r] -> [m]; 0 if another rank has its column."""
        elements = self.tokens * logits.shape[1] + self.columns  # of the flattened logits
        return logits.view(-1).gather(0, elements).where(self.is_local, 0)

    def logits_gradient(self, softmax: Tensor, factor: Tensor, gradient: Tensor) -> None:
        """Writes d(logits) of the cross entropy to `gradient` [C, V_r]: softmax times factor [C, 1], minus weights.

        Overwrites `softmax` [C, V_r], whose memory `gradient` may share. `gradient` may have another dtype.
        """
        # `factor` is the weights `by_token`. In `cross_entropy_` also times 1 + 2 z lse, for the z-loss, and times the
        # probability of this rank's rows, because `softmax` is over these rows alone there.
        elements = self.tokens * softmax.shape[1] + self.columns  # of the flattened logits
        weights = self.weights.where(self.is_local, 0)  # each is subtracted in its label's column
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


@dataclass(frozen=True)
class VocabularyShard:
    """Rows `first` to `first + rows - 1` of the weight's `total_rows`: the part on this rank of `axis`.

    A tensor [C, ...] has one entry for each token of a chunk. The first `token_counts(C)[0]` tokens are rank 0's, the
    next are rank 1's, and so on; [c, ...] are this rank's own. On an axis of one rank nothing is sent.
    """

    axis: Axis
    first: int
    rows: int
    total_rows: int

    @classmethod
    def of(cls, rows: int, axis: DeviceMesh | Axis | None, vocabulary: int | None) -> VocabularyShard:
        """Returns this rank's part of the vocabulary. Raises ValueError unless `rows` is V_r, or without V."""
        rank_axis = Axis.alone("vocabulary") if axis is None else Axis.of(axis)
        if axis is not None and vocabulary is None:
            raise ValueError(
                f"vocabulary, the number of rows of all ranks, is needed over axis {rank_axis.name!r} of "
                f"{rank_axis.size} ranks"
            )
        all_rows = rows if vocabulary is None else vocabulary
        # As `torch.chunk` and DTensor's `Shard(0)` cut: ceil(V / R) rows per rank until none are left.
        sizes = dtensor.chunk_sizes(all_rows, rank_axis.size)
        if rows != sizes[rank_axis.rank]:
            raise ValueError(
                f"rank {rank_axis.rank} of {rank_axis.size} on axis {rank_axis.name!r} has {sizes[rank_axis.rank]} of "
                f"vocabulary={vocabulary} rows, as Shard(0) cuts them; got {rows}"
            )
        return cls(rank_axis, sum(sizes[: rank_axis.rank]), rows, all_rows)

    def token_counts(self, tokens: int) -> list[int]:
        """Returns how many of a chunk's tokens each rank owns; equal numbers if R divides `tokens`."""
        base, remainder = divmod(tokens, self.axis.size)
        return [base + (rank < remainder) for rank in range(self.axis.size)]

    def gather(self, x: Tensor, tokens: int, dtype: torch.dtype | None = None) -> Collective[Tensor]:
        """Starts an all-gather, [c, ...] of each rank -> [C, ...] in `dtype`, with C = `tokens`."""
        if self.axis.size == 1:  # converted when the result is taken, so that only one chunk is converted at a time
            return Collective(self.axis, (x,), (), lambda: x if dtype is None else x.to(dtype))
        return start_all_gather(x if dtype is None else x.to(dtype), self.axis, self.token_counts(tokens), 0)

    def scatter(self, x: Tensor, target: Tensor) -> Callable[[], object]:
        """Starts a reduce-scatter of x [C, ...]. The returned function writes the sums to `target` [c, ...]."""
        if self.axis.size == 1:  # copied at once, so that `x` can be freed
            target.copy_(x)
            return lambda: None
        scatter = start_reduce_scatter(x, self.axis, self.token_counts(len(x)), 0)
        return lambda: target.copy_(scatter.wait())

    def merge(self, lse: Tensor, label_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Merges log-sum-exps and label logits of all ranks: [C, 1] over this rank's rows -> [c, 1] over all V rows."""
        # Instead of logits [C, V_r], ranks send two numbers for each token: the log-sum-exp over the rank's rows, and
        # the label's logit (0 if another rank has the label's row). The rank that owns the token merges all of them.
        # One message per pair of ranks has both. A reduce-scatter cannot merge log-sum-exps, so each rank receives the
        # unreduced parts of its own tokens and merges them.
        messages = start_scatter_parts(
            torch.cat([lse, label_logits], 1), self.axis, self.token_counts(len(lse)), 0
        ).wait()
        lses, label_logit_parts = torch.stack(messages).unsqueeze(-1).unbind(2)  # [R, c, 1] each
        return lses.logsumexp(0), label_logit_parts.sum(0)

    def gather_all(self, x: Tensor) -> Tensor:
        """Returns a tensor of all ranks, x -> [R, *x.shape] in rank order."""
        return start_all_gather(x.unsqueeze(0), self.axis, [1] * self.axis.size, 0).wait()


def check_integers(name: str, x: Tensor, accepted: str, ndim: int) -> None:
    """Raises ValueError unless `x` is a local tensor of integers with `ndim` dims, which `accepted` describes."""
    check_local(name, x)
    if x.is_floating_point() or x.ndim != ndim:
        raise ValueError(f"{name} must be integers {accepted}; got {x.dtype} {tuple(x.shape)}")
