"""What methods on the head axis have in common: which heads are whose, and a sequence-axis method inside."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.local import Local
from armillary.attention.mask import AttentionMask
from armillary.attention.method import Method
from armillary.core import Axis, SequenceLayout

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


def split_heads(key_heads: tuple[int, ...], ranks: int) -> HeadShards:
    """Consecutive query heads for each rank, counts differing by one at most, with the key/value heads that they use.

    Args:
        key_heads: for each query head, its key/value head.
    """
    heads = SequenceLayout.contiguous(len(key_heads), ranks)
    queries = tuple(heads.spans(rank)[0] for rank in range(ranks))
    return HeadShards(queries, tuple(range(key_heads[q[0]], key_heads[q[-1]] + 1) for q in queries))


class HeadMethod(Method):
    """A method that turns sequence shards of one mesh axis of U ranks into head shards, around `inner`.

    Args:
        axis: a 1-D mesh, such as `mesh["ulysses"]`, or an axis of one.
        inner: any method over other axes; Local unless given.
    """

    def __init__(self, axis: DeviceMesh | Axis, inner: Method | None = None) -> None:
        self.axis = self.head_axis = Axis.of(axis)
        self.inner = Local() if inner is None else inner
        self.shards = self.inner.shards * self.axis.size
        self.shard = self.inner.shard * self.axis.size + self.axis.rank
        self.sequence_shards = self.inner.sequence_shards

    @property
    def inside(self) -> Method:
        return self.inner

    def layout(self, length: int, kind: str = "zigzag", mask: AttentionMask | None = None) -> SequenceLayout:
        return self.inner.layout(length, kind, mask).refine(self.axis.size)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if q.shape[2] < self.axis.size:
            raise ValueError(
                f"{q.shape[2]} query heads cannot be split over {self.axis.size} ranks of axis {self.axis.name!r}; "
                f"give it at most {q.shape[2]} ranks and the rest to the sequence axis"
            )
        self.inner.check(q, k, v)

    def sizes(self, layout: SequenceLayout) -> tuple[int, ...]:
        """Tokens that each rank of the axis holds of the sequence shard that they share."""
        first = self.inner.shard * self.axis.size
        return layout.refine(self.shards // self.sequence_shards).sizes[first : first + self.axis.size]
