"""A vocabulary sharded over the ranks of an axis, and the exchanges about its logits.

Each rank has some rows of the head's weight, so its logits [C, V_r] of C tokens. From them it computes three numbers
per token: the log-sum-exp, the label's logit if it has that row, and, given the log-sum-exp over all rows, its part of
the gradient. The owner of a token sums them up; no logit is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import Axis
from armillary.core.collectives.all_gather import start_all_gather
from armillary.core.collectives.collective import Collective
from armillary.core.collectives.reduce_scatter import start_reduce_scatter, start_scatter_parts


@dataclass(frozen=True)
class VocabularyShard:
    """Rows `first` to `first + rows` of `whole`, those of this rank of `axis`. On one rank nothing is sent.

    C tokens of all R ranks are ordered by rank, `shares(C)` of each; of a tensor [C, ...] this rank's own are [c, ...].
    """

    axis: Axis
    first: int
    rows: int
    whole: int

    @classmethod
    def of(cls, rows: int, axis: DeviceMesh | Axis | None, vocabulary: int | None) -> VocabularyShard:
        """Returns this rank's part, as `torch.chunk` and DTensor's `Shard(0)` cut: ceil(V / R) rows each while there
        are any.

        Args:
            rows: number of this rank's rows, V_r.
            axis: a 1-D mesh of R ranks; None for one rank.
            vocabulary: V, needed with an axis.

        Raises:
            ValueError: no V with an axis, or other rows than this rank's part of V.
        """
        along = Axis.alone("vocabulary") if axis is None else Axis.of(axis)
        if axis is not None and vocabulary is None:
            raise ValueError(
                f"over axis {along.name!r} of {along.size} ranks, vocabulary must say how many rows all have"
            )
        all_rows = rows if vocabulary is None else vocabulary
        part = range(all_rows)[cut(all_rows, along)]
        if rows != len(part):
            raise ValueError(
                f"rank {along.rank} of {along.size} on axis {along.name!r} has {len(part)} of vocabulary={vocabulary} "
                f"rows, as Shard(0) cuts them; got {rows}"
            )
        return cls(along, part.start, rows, all_rows)

    @property
    def alone(self) -> bool:
        """True if this rank has all rows."""
        return self.axis.size == 1

    # -- tokens -------------------------------------------------------------------------------------------------------

    def shares(self, tokens: int) -> list[int]:
        """Returns how many of `tokens` each rank sums up; equal if R divides them."""
        base, remainder = divmod(tokens, self.axis.size)
        return [base + (rank < remainder) for rank in range(self.axis.size)]

    def own(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens, [C, ...] -> [c, ...]. Sends nothing."""
        return x.split(self.shares(len(x)))[self.axis.rank]

    def gather(self, x: Tensor, tokens: int, dtype: torch.dtype | None = None) -> Collective[Tensor]:
        """Starts gathering: [c, ...] of each rank -> [C, ...], C = `tokens`, in `dtype`.

        Bytes sent: (R - 1) times those of `x`, padded to the largest share, kind "all_gather".
        """
        if self.alone:  # converted only when it is needed
            return Collective(self.axis, (x,), (), lambda: x if dtype is None else x.to(dtype))
        return start_all_gather(x if dtype is None else x.to(dtype), self.axis, self.shares(tokens), 0)

    def scatter(self, x: Tensor, into: Tensor) -> Callable[[], object]:
        """Starts summing [C, ...] over ranks; calling the result waits, and writes this rank's own to `into` [c, ...].

        Bytes sent: those of the other ranks' tokens in `x`, kind "reduce_scatter".
        """
        if self.alone:  # written right away, so that `x` can go
            into.copy_(x)
            return lambda: None
        moving = start_reduce_scatter(x, self.axis, self.shares(len(x)), 0)
        return lambda: into.copy_(moving.wait())

    def merged(self, lse: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Merges each rank's log-sum-exp and part of the labels' logits, [C, 1] -> those of all rows, [c, 1].

        Bytes sent: those of the other ranks' tokens in both, kind "reduce_scatter".
        """
        if self.alone:
            return lse, chosen
        parts = start_scatter_parts(torch.cat([lse, chosen], 1), self.axis, self.shares(len(lse)), 0).wait()
        lses, chosens = torch.stack(parts).unsqueeze(-1).unbind(2)  # [R, c, 1] each
        return lses.logsumexp(0), chosens.sum(0)

    def total(self, losses: Tensor) -> Tensor:
        """Returns the sum of all ranks' losses [c], added in rank order on each rank, so with the same bits on all of
        them.

        Bytes sent: (R - 1) scalars, kind "all_gather".
        """
        own_sum = losses.sum()
        return (
            own_sum
            if self.alone
            else start_all_gather(own_sum.view(1), self.axis, [1] * self.axis.size, 0).wait().sum()
        )

    # -- labels and logits --------------------------------------------------------------------------------------------

    def check_labels(self, labels: Tensor, ignore: int) -> None:
        """Makes torch raise on every rank for a label outside of the vocabulary; on one rank it does so anyway."""
        if not self.alone:
            labels.new_zeros(1).expand(self.whole).gather(0, labels.flatten().where(labels.flatten() != ignore, 0))

    def find(self, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the labels' places among this rank's rows, and a mask of those on this rank; the place of others is
        0.
        """
        if self.alone:
            return labels.where(valid, 0), valid
        places = labels - self.first
        on_this_rank = valid & (places >= 0) & (places < self.rows)
        return places.where(on_this_rank, 0), on_this_rank

    def share(self, x: Tensor, part: Tensor, lse: Tensor) -> Tensor:
        """Returns `x` times exp(part - lse), the probability of this rank's rows."""
        return x if self.alone else x * (part - lse).exp()


def cut(vocabulary: int, axis: Axis) -> slice:
    """Returns the rank's part of V rows, as `torch.chunk` cuts them."""
    each = ceil(vocabulary / axis.size)
    return slice(axis.rank * each, (axis.rank + 1) * each)
