"""`LogSumExpPartial`: the placement of attention over a part of the keys, which redistributing merges.

    packed = pack_partial(out, lse)                                      # [B, N, H, D], [B, N, H] -> [B, N, H, D + 1]
    partial = DTensor.from_local(packed, mesh["ring"], [LogSumExpPartial()])
    out, lse = unpack_partial(partial.redistribute(placements=[Shard(1)]))

Every rank of the axis has attended with the same queries to keys of its own. What they found is merged in rank order:
out = sum_r w_r out_r with w_r = exp(lse_r - lse), and lse = log sum_r exp(lse_r). A row of which no rank has seen
anything, all with lse = -inf, has out = 0 and lse = -inf.

Forward only. torch takes whatever is partial for a sum in backward, and would give gradients that are silently wrong,
so what requires a gradient is refused; `merge_scatter` is the merge with a gradient. And no op knows such a placement:
all are refused but `redistribute`, `full_tensor` and `to_local`. `clone` and `detach` too: torch would merge in some
releases (2.15), and in others would not (2.11).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from armillary.core import compat
from armillary.core.accumulate import accumulation_dtype
from armillary.core.collectives.all_gather import start_all_gather
from armillary.core.collectives.merge import merge_
from armillary.core.collectives.reduce_scatter import start_scatter_parts
from armillary.core.mesh import Axis
from armillary.core.placements import chunk_sizes, describe
from armillary.core.validation import check_tensor

PACKED, APART = "logsumexp of packed (out, lse)", "logsumexp of (out, lse) apart"
"""Reductions of our own: torch lets "sum" through many ops, and merges what calls itself the same."""


class LogSumExpPartial(Partial):
    """Attention over a part of the keys on each rank of an axis: the log-sum-exp merge is still to be done.

    Of a DTensor of (out, lse) packed along its last dim (`pack_partial`), in float32 or wider. `redistribute` to
    `Replicate` merges everywhere, to `Shard` this rank's part alone; over several axes too, and where shards are
    uneven. The last dim itself can be sharded over no axis. `Partial("logsumexp")` is torch's, and another placement.

    Args:
        packed: False for `out` and `lse` as a DTensor each, as `merge_scatter` takes them. Apart they cannot be
            redistributed.

    Bytes sent on an axis of C ranks: to `Shard`, those of the other ranks' parts, kind "reduce_scatter"; to
    `Replicate`, (C - 1) / C of the local tensor twice, kinds "reduce_scatter" and "all_gather".

    Raises:
        ValueError: in `redistribute`, before any communication: of what requires a gradient, is in a dtype below
            float32, or is or is to be sharded along the last dim. In every other op, with its name.
    """

    def __init__(self, packed: bool = True) -> None:
        super().__init__(PACKED if packed else APART)

    def __new__(cls, packed: bool = True) -> LogSumExpPartial:
        return super().__new__(cls, PACKED if packed else APART)

    @property
    def packed(self) -> bool:
        """Whether out and lse are one tensor."""
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

    # -- what torch calls in redistribute ----------------------------------------------------------------------------

    def _reduce_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        check_packed(tensor)
        axis, rows = Axis.on(mesh, mesh_dim), tensor.flatten(0, -2)
        sizes = chunk_sizes(len(rows), axis.size)
        merged = merge_parts(start_scatter_parts(rows, axis, sizes, 0).wait())
        return start_all_gather(merged, axis, sizes, 0).wait().view(tensor.shape)

    def _reduce_shard_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, shard_spec: Placement) -> Tensor:
        check_packed(tensor)
        axis, dim = Axis.on(mesh, mesh_dim), cast(Shard, shard_spec).dim
        return merge_parts(start_scatter_parts(tensor, axis, chunk_sizes(tensor.shape[dim], axis.size), dim).wait())

    def _partition_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        raise ValueError(f"{self!r} is no placement to distribute to; give each rank's own part to DTensor.from_local")


def pack_partial(out: Tensor, lse: Tensor) -> Tensor:
    """Attention over a part of the keys as one tensor: out [..., D] and lse [...] -> [..., D + 1].

    In the wider dtype of the two, float32 at least.

    Raises:
        ValueError: shapes that do not fit, what is not floating, or what requires a gradient.
    """
    for name, x in (("out", out), ("lse", lse)):
        check_tensor(name, x)
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} {forward_only()}")
    if out.ndim < 1 or lse.shape != out.shape[:-1] or not (out.is_floating_point() and lse.is_floating_point()):
        raise ValueError(
            f"out {tuple(out.shape)} in {out.dtype} and lse {tuple(lse.shape)} in {lse.dtype} do not fit together; "
            f"lse must be {tuple(out.shape[:-1])}, and both floating"
        )
    dtype = accumulation_dtype(torch.promote_types(out.dtype, lse.dtype))
    return torch.cat([out.to(dtype), lse.to(dtype).unsqueeze(-1)], -1)


def unpack_partial(packed: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """(out [..., D], lse [...]) from [..., D + 1], local or a DTensor that is merged; out in `dtype`, if given."""
    out, lse = packed[..., :-1], packed[..., -1]
    return (out if dtype is None else out.to(dtype)), lse


def merge_parts(parts: Sequence[Tensor]) -> Tensor:
    """The merge of packed attention over some keys each, in order. What saw nothing weighs nothing, even if NaN."""
    merged, *others = (torch.where(part[..., -1:] == -torch.inf, _unseen(part), part) for part in parts)
    for part in others:
        merge_(merged[..., :-1], merged[..., -1], part[..., :-1], part[..., -1])
    return merged


def _unseen(part: Tensor) -> Tensor:
    """A row that saw nothing: out = 0 and lse = -inf."""
    row = part.new_zeros(part.shape[-1])
    row[-1] = -torch.inf
    return row


def forward_only() -> str:
    return "requires a gradient, which LogSumExpPartial has none for; merge_scatter(out, lse, axis) has one"


def check_packed(x: Tensor) -> None:
    """Refuses what is no (out, lse) packed along its last dim."""
    if not x.is_floating_point() or x.dtype != accumulation_dtype(x.dtype) or x.ndim < 2 or x.shape[-1] < 2:
        raise ValueError(f"{tuple(x.shape)} in {x.dtype} is no packed (out, lse); pack_partial(out, lse) makes one")


def check_op(op: object, placements: Sequence[Placement]) -> None:
    """Refuses ops that know nothing of the merge that is pending.

    Raises:
        compat.OpRefused: a ValueError, naming the op.
    """
    found = next((p for p in placements if isinstance(p, LogSumExpPartial)), None)
    if found is not None:
        hint = "redistribute it first, to Replicate() or Shard(dim)" if found.packed else "merge_scatter takes it"
        raise compat.OpRefused(f"{op} cannot be applied to a DTensor that is {found!r}: {hint}")


def check_redistribution(x: DTensor, target: Sequence[Placement]) -> None:
    """Refuses what would not be merged, or not as it should.

    Raises:
        ValueError: with the placements.
    """
    pending = [p for p in x.placements if isinstance(p, LogSumExpPartial)]
    if not pending:
        return
    if not pending[0].packed:
        raise ValueError(f"{describe(x)} is out or lse alone; merge_scatter(out, lse, axis) merges them")
    if x.requires_grad:
        raise ValueError(f"{describe(x)} {forward_only()}")
    if any(getattr(p, "dim", None) == x.ndim - 1 for p in (*x.placements, *target)):
        raise ValueError(
            f"{describe(x)} to {tuple(target)}: the last dim holds out and lse, and can be sharded over no axis; "
            f"choose another dim"
        )


compat.guard_dtensors(check_op, check_redistribution)
