"""The vocabulary cut over the ranks of an axis, and what its ranks tell each other of logits that are cut likewise.

Each rank has a few rows of the head's weight, so its logits [C, V_r] of C tokens. Of them it makes three numbers for
each token: their log-sum-exp, its label's logit if that is among them, and later, from the log-sum-exp over all of
the vocabulary, its part of the gradient. Whoever holds a token sums up; no logit is ever sent.
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
    """Rows `first` to `first + rows` of `whole`, those of this rank of `axis`. With one rank nothing is ever sent.

    C tokens of all R ranks lie rank by rank, `shares(C)` of each; of a tensor [C, ...] this rank's own are [c, ...].
    """

    axis: Axis
    first: int
    rows: int
    whole: int

    @classmethod
    def of(cls, rows: int, axis: DeviceMesh | Axis | None, vocabulary: int | None) -> VocabularyShard:
        """This rank's part, as `torch.chunk` and DTensor's `Shard(0)` cut: ceil(V / R) rows each while there are any.

        Args:
            rows: how many this rank has, V_r.
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
        whole = rows if vocabulary is None else vocabulary
        part = range(whole)[cut(whole, along)]
        if rows != len(part):
            raise ValueError(
                f"rank {along.rank} of {along.size} on axis {along.name!r} has {len(part)} of vocabulary={vocabulary} "
                f"rows, as Shard(0) cuts them; got {rows}"
            )
        return cls(along, part.start, rows, whole)

    @property
    def alone(self) -> bool:
        """Whether this rank has all rows."""
        return self.axis.size == 1

    # -- tokens -------------------------------------------------------------------------------------------------------

    def shares(self, tokens: int) -> list[int]:
        """How many of `tokens` each rank sums up; alike where R divides them."""
        base, more = divmod(tokens, self.axis.size)
        return [base + (rank < more) for rank in range(self.axis.size)]

    def own(self, x: Tensor) -> Tensor:
        """[C, ...] -> [c, ...]. Sends nothing."""
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
        """Each rank's log-sum-exp and its part of the chosen logits, [C, 1] -> those of all rows, [c, 1].

        Bytes sent: those of the other ranks' tokens in both, kind "reduce_scatter".
        """
        if self.alone:
            return lse, chosen
        parts = start_scatter_parts(torch.cat([lse, chosen], 1), self.axis, self.shares(len(lse)), 0).wait()
        lses, chosens = torch.stack(parts).unsqueeze(-1).unbind(2)  # [R, c, 1] each
        return lses.logsumexp(0), chosens.sum(0)

    def total(self, losses: Tensor) -> Tensor:
        """The sum of all ranks' losses [c], added up in rank order on each rank, so the same bits on all of them.

        Bytes sent: (R - 1) scalars, kind "all_gather".
        """
        mine = losses.sum()
        return mine if self.alone else start_all_gather(mine.view(1), self.axis, [1] * self.axis.size, 0).wait().sum()

    # -- labels and logits --------------------------------------------------------------------------------------------

    def check_labels(self, labels: Tensor, ignore: int) -> None:
        """Lets torch raise on every rank for a label that no rank has; with one rank it will by itself."""
        if not self.alone:
            labels.new_zeros(1).expand(self.whole).gather(0, labels.flatten().where(labels.flatten() != ignore, 0))

    def find(self, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Labels -> their places among this rank's rows, and whether they are among them; the place of others is 0."""
        if self.alone:
            return labels.where(valid, 0), valid
        places = labels - self.first
        here = valid & (places >= 0) & (places < self.rows)
        return places.where(here, 0), here

    def share(self, x: Tensor, part: Tensor, lse: Tensor) -> Tensor:
        """`x` times exp(part - lse), what this rank's rows have of all probability."""
        return x if self.alone else x * (part - lse).exp()


def cut(vocabulary: int, axis: Axis) -> slice:
    """The rank's part of V rows, as `torch.chunk` cuts them."""
    each = ceil(vocabulary / axis.size)
    return slice(axis.rank * each, (axis.rank + 1) * each)
