"""What methods on the head axis have in common: which heads are whose, and a sequence-axis method inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.comm_plan import AttentionShape, CommPlan, Move, placed, to_each, together
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.attention.methods.entry import InnerPlan
from armillary.attention.methods.local import Local
from armillary.core import Axis, SequenceLayout
from armillary.core.grid import check_grid

Arriving = Callable[[], Tensor]
"""Waits for a tensor that is on its way."""


class HeadShards(NamedTuple):
    """Which query and key/value heads each rank of the head axis works on. Key ranges overlap where K < U."""

    queries: tuple[range, ...]
    keys: tuple[range, ...]

    @property
    def shared(self) -> bool:
        """Whether several ranks work on one key/value head."""
        return any(a.stop > b.start for a, b in pairwise(self.keys))

    def key_heads(self, key_heads: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """For each query head of a rank, which of that rank's key/value heads it uses; given the same of all heads."""
        return tuple(key_heads[head] - self.keys[rank].start for head in self.queries[rank])


@lru_cache(maxsize=256)
def split_heads(key_heads: tuple[int, ...], ranks: int) -> HeadShards:
    """Consecutive query heads for each rank, counts differing by one at most, with the key/value heads that they use.

    Args:
        key_heads: for each query head, its key/value head.
    """
    heads = SequenceLayout.contiguous(len(key_heads), ranks)
    queries = tuple(heads.spans(rank)[0] for rank in range(ranks))
    return HeadShards(queries, tuple(range(key_heads[q[0]], key_heads[q[-1]] + 1) for q in queries))


class HeadMoves:
    """The all-to-alls of a call on all P x U ranks, in groups of U, and what is inside of them.

    Raises:
        ValueError: fewer query heads than U.
    """

    def __init__(self, work: AttentionShape, ranks: int) -> None:
        check_heads(len(work.key_heads), ranks)
        self.work, self.ranks = work, ranks
        self.heads = split_heads(work.key_heads, ranks)
        self.tokens, self.keys = work.layout.refine(ranks).sizes, work.key_layout.refine(ranks).sizes
        self.groups = [range(r * ranks, (r + 1) * ranks) for r in range(work.layout.shards)]

    def to_heads(self, tokens: Sequence[int], heads: Sequence[range], size: int) -> Move:
        """Tokens of each rank, with the heads of each to it; `size` bytes a token and head."""
        return self._move(lambda source, target: tokens[source] * len(heads[target % self.ranks]) * size)

    def to_tokens(self, tokens: Sequence[int], heads: Sequence[range], size: int) -> Move:
        """The way back: each rank's heads, with the tokens of each to it."""
        return self._move(lambda source, target: tokens[target] * len(heads[source % self.ranks]) * size)

    def inside(self, inner: InnerPlan, works: tuple[AttentionShape | None, ...]) -> CommPlan:
        """What goes on on the sequence axis, with the work of each rank of the head axis, if it has any."""
        known = {work: inner(work) for work in works if work}
        shards = self.work.layout.shards
        whole = [(known[work], range(u, shards * self.ranks, self.ranks)) for u, work in enumerate(works) if work]
        total = shards * self.ranks
        return CommPlan(
            together([placed(plan.forward, ranks, total) for plan, ranks in whole]),
            together([placed(plan.backward, ranks, total) for plan, ranks in whole]),
        )

    def _move(self, size: Callable[[int, int], int]) -> Move:
        return to_each("all_to_all", "ulysses", self.groups, size)


def check_heads(heads: int, ranks: int, axis: str = "ulysses") -> None:
    """Refuses fewer query heads than ranks to split them over."""
    if heads < ranks:
        raise ValueError(
            f"{heads} query heads cannot be split over {ranks} ranks of axis {axis!r}; "
            f"give it at most {heads} ranks and the rest to the sequence axis"
        )


def checked_inner(inner: Method | None) -> Method:
    """The method inside: Local unless given."""
    if inner is not None and not isinstance(inner, Method):  # pyright: ignore[reportUnnecessaryIsInstance]
        found = inner.__name__ if isinstance(inner, type) else type(inner).__name__
        raise ValueError(f"inner={found} is no method; give one that is made already, such as Ring(mesh['ring'])")
    return Local() if inner is None else inner


class HeadMethod(Method):
    """A method that turns sequence shards of one mesh axis of U ranks into head shards, around `inner`.

    Args:
        axis: a 1-D mesh, such as `mesh["ulysses"]`, or an axis of one.
        inner: any method over other axes; Local unless given.

    Raises:
        ValueError: `inner` is no method, or works on an axis that does not span a grid of ranks with this one, such as
            this one itself.
    """

    def __init__(self, axis: DeviceMesh | Axis, inner: Method | None = None) -> None:
        axis, inner = Axis.of(axis), checked_inner(inner)
        for its in inner.axes:
            check_grid(axis, its)
        self.compose(axis, inner)

    def compose(self, axis: Axis, inner: Method) -> None:
        """Takes an axis and a method that are known to fit together."""
        self.axis = self.head_axis = axis
        self.inner = inner
        self.shards = self.inner.shards * self.axis.size
        self.shard = self.inner.shard * self.axis.size + self.axis.rank
        self.sequence_shards = self.inner.sequence_shards

    @property
    def sequence_method(self) -> Method:
        return self.inner

    def layout(self, length: int, kind: str = "zigzag", mask: AttentionMask | None = None) -> SequenceLayout:
        return self.inner.layout(length, kind, mask).refine(self.axis.size)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_heads(q.shape[2], self.axis.size, self.axis.name)
        self.inner.check(q, k, v)

    def sizes(self, layout: SequenceLayout) -> tuple[int, ...]:
        """Tokens that each rank of the axis holds of the sequence shard that they share."""
        first = self.inner.shard * self.axis.size
        return layout.refine(self.shards // self.sequence_shards).sizes[first : first + self.axis.size]
