"""`LogSumExpPartial`: the DTensor placement of attention over each rank's keys, which `redistribute` merges.

    packed = pack_partial(out, lse)                                      # [B, N, H, D], [B, N, H] -> [B, N, H, D + 1]
    partial = DTensor.from_local(packed, mesh["ring"], [LogSumExpPartial()])
    out, lse = unpack_partial(partial.redistribute(placements=[Shard(1)]))

Every rank r of the axis has computed attention of the same queries over its own keys, (out_r, lse_r). The results are
merged in rank order: out = sum_r w_r out_r with w_r = exp(lse_r - lse), and lse = log sum_r exp(lse_r). A row without
visible keys on any rank has lse_r = -inf on every rank, and the merged row has out = 0 and lse = -inf.

There is no gradient, because torch's backward would treat the placement as a sum and be silently wrong; `merge_scatter`
has one. Of the ops on DTensors with this placement only `redistribute`, `full_tensor` and `to_local` are supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from armillary.core import compat
from armillary.core.argument_checks import check_tensor
from armillary.core.collectives.collective import accumulation_dtype, start_all_gather, start_scatter_parts
from armillary.core.collectives.merge import merge, merge_
from armillary.core.dtensor import (
    check_alike,
    check_kinds,
    check_tokens,
    chunk_sizes,
    describe,
    local_of,
    result_like,
)
from armillary.core.mesh import Axis

PACKED, SEPARATE = "logsumexp of packed (out, lse)", "logsumexp of (out, lse) apart"
"""Names of the reduction, for `Partial.reduce_op`. They must not be names of torch: it lets "sum" pass through many
ops, and takes placements with equal names for the same one."""


FORWARD_ONLY = "requires a gradient, which LogSumExpPartial does not support; merge_scatter(out, lse, axis) does"
"""End of the error about a tensor that requires a gradient."""


class LogSumExpPartial(Partial):
    """Placement of attention over each rank's own keys, to be merged over ranks by log-sum-exp.

    For DTensors of (out, lse) packed along the last dim (`pack_partial`), in float32 or wider. `redistribute` to
    `Replicate` merges all rows on every rank, `redistribute` to `Shard` only the rows of each rank's shard. A DTensor
    may have this placement on several axes, and its shards may be uneven, but no axis may shard the last dim.
    torch's `Partial("logsumexp")` is another placement.

    Args:
        packed: True for `out` and `lse` packed into one DTensor. False for two DTensors, which `merge_scatter` takes
            and `redistribute` refuses.

    Bytes sent on an axis of C ranks: to `Shard`, the other ranks' shards of the local tensor, kind "reduce_scatter"; to
    `Replicate`, (C - 1) / C of the local tensor twice, kinds "reduce_scatter" and "all_gather".

    Raises:
        ValueError: in `redistribute`, before any communication, for a tensor that requires a gradient, has a dtype
            below float32, or is or would be sharded along the last dim. In every other op, with the op's name.
    """

    def __init__(self, packed: bool = True) -> None:
        # Subclassing Partial makes redistribute call the _reduce methods below.
        super().__init__(PACKED if packed else SEPARATE)

    def __new__(cls, packed: bool = True) -> LogSumExpPartial:
        return super().__new__(cls, PACKED if packed else SEPARATE)

    @property
    def packed(self) -> bool:
        return self.reduce_op == PACKED

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LogSumExpPartial) and self.packed == other.packed

    def __hash__(self) -> int:
        return hash((LogSumExpPartial, self.packed))

    def __repr__(self) -> str:
        return f"LogSumExpPartial({'' if self.packed else 'packed=False'})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return LogSumExpPartial, (self.packed,)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        return repr(self), {"LogSumExpPartial": LogSumExpPartial}

    # -- hooks that torch calls in redistribute ----------------------------------------------------------------------

    def _reduce_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        check_packed(tensor)
        axis, rows = Axis.on(mesh, mesh_dim), tensor.flatten(0, -2)
        sizes = chunk_sizes(len(rows), axis.size)
        # To Replicate: a reduce-scatter of rows, so that only one rank merges each row, then an all-gather.
        merged_rows = merge_parts(start_scatter_parts(rows, axis, sizes, 0).wait())
        return start_all_gather(merged_rows, axis, sizes, 0).wait().view(tensor.shape)

    def _reduce_shard_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, shard_spec: Placement) -> Tensor:
        # To Shard: a reduce-scatter, in which each rank receives its shard of every other rank's partial result.
        check_packed(tensor)
        axis, dim = Axis.on(mesh, mesh_dim), cast(Shard, shard_spec).dim
        return merge_parts(start_scatter_parts(tensor, axis, chunk_sizes(tensor.shape[dim], axis.size), dim).wait())

    def _partition_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        raise ValueError(f"cannot distribute to {self!r}; pass each rank's own part to DTensor.from_local")


def merge_scatter(out: Tensor, lse: Tensor, axis: Axis, sizes: Sequence[int] | None) -> tuple[DTensor, DTensor]:
    """Redistributes out and lse from `LogSumExpPartial(packed=False)` on the axis to `Shard(1)`."""
    placed = check_kinds({"out": out, "lse": lse})
    check_alike(placed)
    placed_out, placed_lse = placed.values()
    (axis_dim,), chunks = check_tokens("out", placed_out, [axis], placement=LogSumExpPartial(packed=False), sizes=sizes)
    local_out, local_lse = merge(local_of(placed_out), local_of(placed_lse), axis, chunks)
    shard = {axis_dim: Shard(1)}
    return result_like(placed_out, local_out, out.shape, shard), result_like(placed_lse, local_lse, lse.shape, shard)


def pack_partial(out: Tensor, lse: Tensor) -> Tensor:
    """Packs attention over some keys into one tensor: out [..., D] and lse [...] -> [..., D + 1].

    The dtype of the result is the wider one of out and lse, and at least float32.

    Raises:
        ValueError: shapes do not fit together, a dtype is not floating, or a tensor requires a gradient.
    """
    for name, x in (("out", out), ("lse", lse)):
        check_tensor(name, x)
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} {FORWARD_ONLY}")
    if out.ndim < 1 or lse.shape != out.shape[:-1] or not (out.is_floating_point() and lse.is_floating_point()):
        raise ValueError(
            f"out {tuple(out.shape)} in {out.dtype} and lse {tuple(lse.shape)} in {lse.dtype} do not fit together; "
            f"lse must be {tuple(out.shape[:-1])}, and both floating"
        )
    dtype = accumulation_dtype(torch.promote_types(out.dtype, lse.dtype))
    return torch.cat([out.to(dtype), lse.to(dtype).unsqueeze(-1)], -1)


def unpack_partial(packed: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Returns (out [..., D], lse [...]) as views of `packed` [..., D + 1], a local tensor or a merged DTensor.

    Args:
        dtype: dtype to which `out` is converted; by default that of `packed`.
    """
    out, lse = packed[..., :-1], packed[..., -1]
    return (out if dtype is None else out.to(dtype)), lse


def merge_parts(parts: Sequence[Tensor]) -> Tensor:
    """Returns the merge of packed attention over disjoint keys, in the order of `parts`."""
    # A row without visible keys must not change the result, even if its out is NaN. A weight of 0 would not suffice,
    # because 0 * NaN is NaN: such rows become out = 0, lse = -inf first.
    empty_row = parts[0].new_zeros(parts[0].shape[-1])
    empty_row[-1] = -torch.inf
    result, *later_parts = (torch.where(partial[..., -1:] == -torch.inf, empty_row, partial) for partial in parts)
    for partial in later_parts:
        merge_(result[..., :-1], result[..., -1], partial[..., :-1], partial[..., -1])
    return result


def check_packed(x: Tensor) -> None:
    if not x.is_floating_point() or x.dtype != accumulation_dtype(x.dtype) or x.ndim < 2 or x.shape[-1] < 2:
        raise ValueError(
            f"{tuple(x.shape)} in {x.dtype} is not a packed (out, lse); pack_partial(out, lse) returns one"
        )


def check_op(op: object, placements: Sequence[Placement]) -> None:
    # `clone` and `detach` too: before these torch merges in some releases (2.15) and not in others (2.11).
    partial = next((p for p in placements if isinstance(p, LogSumExpPartial)), None)
    if partial is not None:
        hint = "redistribute it first, to Replicate() or Shard(dim)" if partial.packed else "merge_scatter takes it"
        raise compat.OpRefused(f"{op} cannot be applied to a DTensor that is {partial!r}: {hint}")


def check_redistribution(x: DTensor, target: Sequence[Placement]) -> None:
    partials = [p for p in x.placements if isinstance(p, LogSumExpPartial)]
    if not partials:
        return
    if not partials[0].packed:
        raise ValueError(f"{describe(x)} is out or lse alone; merge_scatter(out, lse, axis) merges them")
    if x.requires_grad:  # torch's backward would treat the placement as a sum
        raise ValueError(f"{describe(x)} {FORWARD_ONLY}")
    # A shard of the last dim would separate lse from its out.
    if any(getattr(p, "dim", None) == x.ndim - 1 for p in (*x.placements, *target)):
        raise ValueError(
            f"{describe(x)} to {tuple(target)}: the last dim holds out and lse, and can be sharded over no axis; "
            f"choose another dim"
        )
    # Checked here too, because torch may communicate over other axes before it calls the _reduce methods.
    if tuple(target) != x.placements:
        check_packed(x)


compat.guard_dtensors(check_op, check_redistribution)
