"""All-gather and reduce-scatter as ops that `torch.compile` does not trace into, so that they break no graph.

`collectives.differentiable` calls them while a graph is traced. An op takes only tensors, numbers and strings. So an
axis is passed as its name and the name of its group, and `axis_of` looks it up when the graph runs. All other ops of
armillary use `TracedAxis`, `axis_of` and `own_memory` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import compat
from armillary.core.collectives.all_gather import start_all_gather
from armillary.core.collectives.reduce_scatter import start_reduce_scatter
from armillary.core.mesh import Axis
from armillary.core.observe.ledger import phase


def all_gather(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int) -> Tensor:
    """Returns `start_all_gather(...).wait()`, differentiable and traceable."""
    if axis.size == 1:
        return x
    return _all_gather(x, axis.name, axis.group.group_name, list(sizes), axis.rank, dim, False)


def reduce_scatter(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int) -> Tensor:
    """Returns `start_reduce_scatter(...).wait()`, differentiable and traceable."""
    if axis.size == 1:
        return x
    return _reduce_scatter(x, axis.name, axis.group.group_name, list(sizes), axis.rank, dim, False)


def _gather(x: Tensor, name: str, group: str, sizes: list[int], rank: int, dim: int, backward: bool) -> Tensor:
    with phase("backward") if backward else nullcontext():
        return own_memory(start_all_gather(x, axis_of(name, group, x), sizes, dim).wait())


def _scatter(x: Tensor, name: str, group: str, sizes: list[int], rank: int, dim: int, backward: bool) -> Tensor:
    with phase("backward") if backward else nullcontext():
        return own_memory(start_reduce_scatter(x, axis_of(name, group, x), sizes, dim).wait())


def _fake_gather(x: Tensor, name: str, group: str, sizes: list[int], rank: int, dim: int, backward: bool) -> Tensor:
    return x.new_empty((*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]))


def _fake_scatter(x: Tensor, name: str, group: str, sizes: list[int], rank: int, dim: int, backward: bool) -> Tensor:
    return x.new_empty((*x.shape[:dim], sizes[rank], *x.shape[dim + 1 :]))


class _TracedCollective(torch.autograd.Function):
    """Autograd of `all_gather` and `reduce_scatter`: each is the adjoint of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: OpOverload, adjoint: OpOverload, *call: Any) -> Tensor:
        ctx.adjoint, ctx.call = adjoint, call[:-1]  # without the last argument, which is True in backward
        with compat.below_autograd():
            return op(x, *call)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.adjoint(grads[0], *ctx.call, True), *[None] * 8


def _gather_differentiably(x: Tensor, *call: Any) -> Tensor:
    return cast(Tensor, cast(Any, _TracedCollective).apply(x, _all_gather, _reduce_scatter, *call))


def _scatter_differentiably(x: Tensor, *call: Any) -> Tensor:
    return cast(Tensor, cast(Any, _TracedCollective).apply(x, _reduce_scatter, _all_gather, *call))


# The argument `backward` tells the ledger the phase: a graph cannot enter the context manager `phase`.
CALL = "Tensor x, str name, str group, SymInt[] sizes, SymInt rank, SymInt dim, bool backward"
_all_gather = compat.define_op(f"all_gather({CALL}) -> Tensor", _gather, _fake_gather, _gather_differentiably)
_reduce_scatter = compat.define_op(
    f"reduce_scatter({CALL}) -> Tensor", _scatter, _fake_scatter, _scatter_differentiably
)


class TracedAxis(NamedTuple):
    """An axis as constants of a traced graph. `group` is the name of its process group; "" for `Axis.alone`."""

    name: str
    rank: int
    size: int
    group: str


def traced_axis(axis: DeviceMesh | Axis) -> TracedAxis:
    """Returns the axis of a 1-D mesh while a graph is traced, where `Axis.of` cannot read the mesh."""
    if isinstance(axis, Axis):
        has_group = axis.group is not None  # pyright: ignore[reportUnnecessaryComparison] - None for `Axis.alone`
        return TracedAxis(axis.name, axis.rank, axis.size, axis.group.group_name if has_group else "")
    name, rank, size, group = _axis_text(axis).split("|", 3)
    return TracedAxis(name, int(rank), int(size), group)


@compat.constant_when_traced
def _axis_text(mesh: DeviceMesh) -> str:
    # As one string, because dynamo makes a string a constant of the graph.
    axis = Axis.of(compat.traced_object(mesh))
    return f"{axis.name}|{axis.rank}|{axis.size}|{axis.group.group_name}"


def axis_of(name: str, group: str, x: Tensor) -> Axis:
    """Returns the axis with this name and group name, for tensors on the device of `x`."""
    if not group:
        return Axis.alone(name)
    process_group = compat.find_group(group)
    device = x.device.type
    timeout = compat.host_timeout(process_group, device)
    return Axis(name, dist.get_rank(process_group), process_group.size(), process_group, timeout, device)


def own_memory(x: Tensor) -> Tensor:
    """Returns `x` in the form that results of ops must have: contiguous, alone in its storage, and not a view.

    Autograd lets callers write in place to a result that is not a view.
    """
    # If x is a part of a larger buffer, it is copied.
    fills_storage = x.untyped_storage().nbytes() == x.nbytes
    result = x.contiguous() if fills_storage else x.clone(memory_format=torch.contiguous_format)
    return compat.no_view(result) if result._is_view() else result
