"""The base class of methods on the head axis, each around a method on the sequence axis."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.attention.methods.head_shards import check_heads
from armillary.attention.methods.local import Local
from armillary.attention.methods.rank_grid import check_inner
from armillary.core import Axis, SequenceLayout
from armillary.core.parts import Side

PendingTensor = Callable[[], Tensor]
"""Waits for a tensor in flight and returns it."""


class HeadMethod(Method):
    """A method that exchanges sequence shards for head shards over one mesh axis of U ranks, and attends with `inner`.

    Args:
        axis: a 1-D mesh, such as `mesh["ulysses"]`, or an axis of one.
        inner: a method over other axes. Local by default.

    Raises:
        ValueError: `inner` is not a method, or one of its axes does not form a grid of ranks with this one, such as
            this axis itself.
    """

    def __init__(self, axis: DeviceMesh | Axis, inner: Method | None = None) -> None:
        axis, inner = Axis.of(axis), Local() if inner is None else inner
        check_inner(axis, inner, "Ring(mesh['ring'])")
        self.compose(axis, inner)

    def compose(self, axis: Axis, inner: Method) -> None:
        """Sets the axis and the inner method, without a check that their axes form a grid of ranks."""
        self.axis = self.head_axis = axis
        self.inner = inner
        self.shards = self.inner.shards * self.axis.size
        self.shard = self.inner.shard * self.axis.size + self.axis.rank
        self.sequence_shards = self.inner.sequence_shards

    @property
    def sequence_method(self) -> Method:
        return self.inner

    @property
    def balanced_by(self) -> Side | None:
        return self.inner.balanced_by

    def layout(self, length: int, kind: str = "zigzag", mask: AttentionMask | None = None) -> SequenceLayout:
        return self.inner.layout(length, kind, mask).refine(self.axis.size)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_heads(q.shape[2], self.axis.size, self.axis.name)
        self.inner.check(q, k, v)

    def sizes(self, layout: SequenceLayout) -> tuple[int, ...]:
        """Returns the number of tokens of each rank of this axis. Together these ranks have one sequence shard."""
        first = self.inner.shard * self.axis.size
        return layout.refine(self.shards // self.sequence_shards).sizes[first : first + self.axis.size]
