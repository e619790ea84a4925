"""A vocabulary sharded over the ranks of an axis, and the communication that replaces sending logits.

Each rank has V_r rows of the head's weight, and so computes logits [C, V_r] of C tokens. It reduces each token's logits
to two numbers: their log-sum-exp, and the label's logit (0 if another rank has the label's row). The rank that owns the
token receives these two numbers of all ranks, merges them, and returns the log-sum-exp over the whole vocabulary to all
ranks. From it each rank computes the gradient of its own logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import Axis, Collective, start_all_gather, start_reduce_scatter, start_scatter_parts
from armillary.core.parts import dtensor


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
        """Returns this rank's part of the vocabulary.

        Rows are cut as by `torch.chunk` and DTensor's `Shard(0)`: ceil(V / R) rows per rank until none are left.

        Args:
            rows: number of this rank's rows, V_r.
            axis: a 1-D mesh of R ranks; None for one rank.
            vocabulary: V, needed with an axis.

        Raises:
            ValueError: an axis without `vocabulary`, or a number of rows that is not this rank's part of V.
        """
        rank_axis = Axis.alone("vocabulary") if axis is None else Axis.of(axis)
        if axis is not None and vocabulary is None:
            raise ValueError(
                f"vocabulary, the number of rows of all ranks, is needed over axis {rank_axis.name!r} of "
                f"{rank_axis.size} ranks"
            )
        all_rows = rows if vocabulary is None else vocabulary
        sizes = dtensor.chunk_sizes(all_rows, rank_axis.size)
        if rows != sizes[rank_axis.rank]:
            raise ValueError(
                f"rank {rank_axis.rank} of {rank_axis.size} on axis {rank_axis.name!r} has {sizes[rank_axis.rank]} of "
                f"vocabulary={vocabulary} rows, as Shard(0) cuts them; got {rows}"
            )
        return cls(rank_axis, sum(sizes[: rank_axis.rank]), rows, all_rows)

    @property
    def alone(self) -> bool:
        """True if this rank has all rows."""
        return self.axis.size == 1

    def token_counts(self, tokens: int) -> list[int]:
        """Returns how many of a chunk's tokens each rank owns; equal numbers if R divides `tokens`."""
        base, remainder = divmod(tokens, self.axis.size)
        return [base + (rank < remainder) for rank in range(self.axis.size)]

    def own_tokens(self, x: Tensor) -> Tensor:
        """Returns this rank's own tokens, [C, ...] -> [c, ...]. No communication."""
        return x.split(self.token_counts(len(x)))[self.axis.rank]

    def gather(self, x: Tensor, tokens: int, dtype: torch.dtype | None = None) -> Collective[Tensor]:
        """Starts an all-gather, [c, ...] of each rank -> [C, ...] in `dtype`, with C = `tokens`.

        Bytes sent: (R - 1) times the bytes of `x`, padded to the largest count, kind "all_gather".
        """
        if self.alone:  # converted when the result is taken, so that only one chunk is converted at a time
            return Collective(self.axis, (x,), (), lambda: x if dtype is None else x.to(dtype))
        return start_all_gather(x if dtype is None else x.to(dtype), self.axis, self.token_counts(tokens), 0)

    def scatter(self, x: Tensor, target: Tensor) -> Callable[[], object]:
        """Starts a reduce-scatter of x [C, ...]. The returned function waits, and writes this rank's sums to `target`.

        Args:
            target: [c, ...].

        Bytes sent: the other ranks' tokens in `x`, kind "reduce_scatter".
        """
        if self.alone:  # copied at once, so that `x` can be freed
            target.copy_(x)
            return lambda: None
        scatter = start_reduce_scatter(x, self.axis, self.token_counts(len(x)), 0)
        return lambda: target.copy_(scatter.wait())

    def merge(self, lse: Tensor, label_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Merges log-sum-exps and label logits of all ranks: [C, 1] over this rank's rows -> [c, 1] over all V rows.

        Bytes sent: both numbers of each token of the other ranks, kind "reduce_scatter".
        """
        # One message per pair of ranks has both. A reduce-scatter cannot merge log-sum-exps, so each rank receives the
        # unreduced parts of its own tokens and merges them.
        messages = start_scatter_parts(
            torch.cat([lse, label_logits], 1), self.axis, self.token_counts(len(lse)), 0
        ).wait()
        lses, label_logit_parts = torch.stack(messages).unsqueeze(-1).unbind(2)  # [R, c, 1] each
        return lses.logsumexp(0), label_logit_parts.sum(0)

    def total(self, losses: Tensor) -> Tensor:
        """Returns the sum of all ranks' losses [c], added in rank order on each rank: bitwise equal on all ranks.

        Bytes sent: (R - 1) scalars, kind "all_gather".
        """
        return self.gather_all(losses.sum().view(1)).sum()

    def gather_all(self, x: Tensor) -> Tensor:
        """Returns a tensor of all ranks, x -> [R, *x.shape] in rank order.

        Bytes sent: (R - 1) times the bytes of `x`, kind "all_gather".
        """
        return start_all_gather(x.unsqueeze(0), self.axis, [1] * self.axis.size, 0).wait()

    def local_columns(self, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each label's column of this rank's logits, or 0, and True if the label is valid and on this rank."""
        columns = labels - self.first
        on_this_rank = valid & (columns >= 0) & (columns < self.rows)
        return columns.where(on_this_rank, 0), on_this_rank
