"""Access to tokens of other positions, on any layout: a new layout, shifted tokens, the tokens around a run.

    relayout            the same tokens, sharded by another layout
    shift               y at i = x at i - offset along the path: labels, token shift, multi-token prediction
    halo                each run of a shard with the tokens before and after it
    short_convolution   causal depthwise convolution, as in hybrid models

A *run* is a span of a shard cut at the boundaries of segments: its tokens are neighbours in one document. In a striped
layout each token is a run. Functions take local tensors of this rank's tokens and a mesh axis, or DTensors that are
sharded on that axis like the layout's shards, and are differentiable. All ranks of the axis must call them in the same
order, and so must their backward passes. If no rank needs a token of another, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from armillary.core import compat
from armillary.core.collectives.autograd import linear
from armillary.core.collectives.token_moves import MoveTable, start_move, start_return
from armillary.core.layout import SequenceLayout
from armillary.core.mesh import Axis
from armillary.core.segments import Segmented, Segments, segments_of
from armillary.core.slices import Integers
from armillary.core.validation import check_tensor, integer

Documents = Sequence[int] | Sequence[Sequence[int]] | Tensor | None


def relayout(
    x: Tensor, source: SequenceLayout, target: SequenceLayout, axis: DeviceMesh | Axis, dim: int = 1
) -> Tensor:
    """Moves tokens to their shards in another layout. Differentiable; takes integer tensors too.

    Args:
        x: [B, T, ...], this rank's tokens by `source`.
        source, target: layouts of the same length over the ranks of the axis.
        dim: of the tokens.

    Returns:
        [B, T', ...], this rank's tokens by `target`.

    Bytes sent: this rank's tokens that change owner, kind "all_to_all"; backward the tokens that it received.

    Raises:
        ValueError: layouts, axis and x that do not match. Raised before any communication.
    """
    mesh_axis = Axis.of(axis)
    if source.length != target.length:
        raise ValueError(f"source has {source.length} tokens and target {target.length}; both need the same length")
    for layout in (source, target):
        _check_layout(layout, mesh_axis)
    if source == target:
        return x
    table = _relayout_table(source, target, mesh_axis.rank)
    return _on_local(x, lambda local: _move(local, dim, mesh_axis, table), mesh_axis, dim, (source, target))


def shift(
    x: Tensor,
    layout: SequenceLayout,
    axis: DeviceMesh | Axis,
    offset: int,
    documents: Documents = None,
    fill: float = 0,
    dim: int = 1,
    *,
    mask: Segmented | None = None,
) -> Tensor:
    """Returns y with y at i = x at i - offset of the same document, or `fill` if there is no such token.

    Args:
        x: [B, T, ...], this rank's tokens.
        offset: tokens back along the path; negative offsets look ahead (labels are -1).
        documents: boundaries 0, end of the first, ..., N, or a list of them for each row.
        mask: an attention mask of documents or of a tree, in place of `documents`.

    Bytes sent: each token of this rank that another rank's shard needs, once per such rank, kind "all_to_all".

    Raises:
        ValueError: a negative offset in a tree, where a token may have several successors; arguments that do not
            match. Raised before any communication.
    """
    mesh_axis, rows = Axis.of(axis), segments_of(layout.length, documents, mask)
    _check_layout(layout, mesh_axis)
    if integer("offset", offset) < 0 and any(row.branching for row in rows):
        raise ValueError(f"offset={offset} in a tree: a token may have several successors; at least 0 is accepted")
    table = _shift_table(layout, rows, offset, mesh_axis.rank)
    return _on_local(x, lambda local: _move(local, dim, mesh_axis, table, len(rows), fill), mesh_axis, dim, (layout,))


def halo(
    x: Tensor,
    layout: SequenceLayout,
    axis: DeviceMesh | Axis,
    left: int,
    right: int = 0,
    documents: Documents = None,
    dim: int = 1,
    *,
    mask: Segmented | None = None,
) -> tuple[Tensor, ...]:
    """Returns each run of this rank's shard with `left` tokens before and `right` after it, zeros beyond its document.

    In a tree the tokens before a segment are the last ones of its path.

    Args:
        x: [B, T, ...], this rank's tokens; local.

    Returns:
        [B, left + n + right, ...] for each run of n tokens, in local order. If rows have different segments, the runs
        of row 0, then of row 1, and so on, with B = 1.

    Bytes sent: as `shift`.

    Raises:
        ValueError: a negative side, tokens to the right in a tree, arguments that do not match. Raised before any
        communication.
    """
    mesh_axis, rows = Axis.of(axis), segments_of(layout.length, documents, mask)
    table, lengths = _halo_of(layout, mesh_axis, rows, left, right)
    runs = _move(x, dim, mesh_axis, table, len(rows), rows_apart=False)
    if len(rows) > 1:
        return tuple(run.unsqueeze(0) for run in runs.split(lengths))
    return runs.split(lengths, dim)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    layout: SequenceLayout,
    axis: DeviceMesh | Axis,
    bias: Tensor | None = None,
    documents: Documents = None,
    *,
    mask: Segmented | None = None,
) -> Tensor:
    """Causal depthwise convolution: y at i = bias + sum_w weight[:, w] x at i - (W - 1 - w), of its own document.

    Args:
        x: [B, T, C], this rank's tokens.
        weight: [C, W], replicated; its gradient is this rank's share of a sum, and so is the gradient of `bias` [C].

    Returns:
        [B, T, C]. In a tree the W - 1 tokens before a segment are the last ones of its path.

    Bytes sent: as `halo` with left = W - 1.

    Raises:
        ValueError: shapes that do not match. Raised before any communication.
    """
    mesh_axis, rows = Axis.of(axis), segments_of(layout.length, documents, mask)
    check_tensor("x", x)
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: [B, T, C] and [C, W] are needed")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)}: one number for each of the {weight.shape[0]} channels is needed")
    kernel_left = weight.shape[1] - 1
    table, lengths = _halo_of(layout, mesh_axis, rows, kernel_left, 0)

    def convolve(local: Tensor) -> Tensor:
        # One convolution over all runs, each preceded by its W - 1 halo tokens. Outputs at halo tokens mix two runs,
        # and are dropped below.
        packed_runs = _move(local, 1, mesh_axis, table, len(rows), rows_apart=False)
        runs = packed_runs.movedim(1, 2) if len(rows) == 1 else packed_runs.t().unsqueeze(0)
        convolved = F.conv1d(runs, weight.unsqueeze(1), bias, groups=weight.shape[0]).movedim(2, 1)
        starts = accumulate(lengths, initial=0)
        outputs = torch.cat([torch.arange(a, a + n - kernel_left) for a, n in zip(starts, lengths, strict=False)])
        return convolved.index_select(1, outputs.to(convolved.device)).reshape(local.shape)

    return _on_local(x, convolve, mesh_axis, 1, (layout,))


def _on_local(
    x: Tensor, function: Callable[[Tensor], Tensor], axis: Axis, dim: int, layouts: Sequence[SequenceLayout]
) -> Tensor:
    """Applies a function to this rank's tokens: of a local tensor, or of a DTensor, which keeps its placements.

    Raises:
        ValueError: a DTensor that is not sharded on the axis along `dim`, or not in shards of these layouts' sizes.
    """
    if not compat.is_dtensor(x):
        return function(x)
    from armillary.core.collectives.dtensors import on_local_tokens

    return on_local_tokens(x, function, axis, dim, [layout.sizes for layout in layouts])


def _move(
    x: Tensor, dim: int, axis: Axis, table: MoveTable, rows: int = 1, fill: float = 0, rows_apart: bool = True
) -> Tensor:
    """Moves tokens on a dim of a local tensor. With several rows, dims 0 and 1 are flattened: row by row.

    Args:
        rows_apart: returns [B, T', ...] for several rows; False returns them flattened.
    """
    check_tensor("x", x)
    if not -x.ndim <= integer("dim", dim) < x.ndim:
        raise ValueError(f"x {tuple(x.shape)} has no dim {dim}; its dims are 0..{x.ndim - 1}")
    if rows > 1 and (dim % x.ndim != 1 or x.shape[0] != rows):
        raise ValueError(f"x {tuple(x.shape)}: segments of {rows} rows need {rows} rows on dim 0, and tokens on dim 1")
    tokens = x.movedim(dim, 0) if rows == 1 else x.flatten(0, 1)
    if len(tokens) != table.tokens:
        raise ValueError(
            f"x {tuple(x.shape)} has {x.shape[dim]} tokens on dim {dim}; the shard has {table.tokens // rows}"
        )
    result = linear(tokens, start_move, start_return, axis, table, fill)
    if rows == 1:
        return result.movedim(0, dim)
    return result.unflatten(0, (rows, -1)) if rows_apart else result


def _check_layout(layout: SequenceLayout, axis: Axis) -> None:
    if layout.shards != axis.size:
        raise ValueError(f"the layout has {layout.shards} shards; axis {axis.name!r} has {axis.size} ranks")


def _halo_of(
    layout: SequenceLayout, axis: Axis, rows: tuple[Segments, ...], left: int, right: int
) -> tuple[MoveTable, list[int]]:
    """Returns the table for all runs with their halos, and the length of each run with its halo on this rank."""
    _check_layout(layout, axis)
    for name, side in (("left", left), ("right", right)):
        integer(name, side, 0)
    if right and any(row.branching for row in rows):
        raise ValueError(f"right={right} in a tree: a token may have several successors; 0 is accepted")
    return _halo_table(layout, rows, left, right, axis.rank)


def runs_of(layout: SequenceLayout, shard: int, segments: Segments) -> list[range]:
    """Returns the runs of a shard in local order: its spans, cut at the boundaries of segments and at steps."""
    return [run for span in layout.spans(shard) for run in segments.cut(span)]


# Every layer and step looks up a table, for few distinct layouts and documents.
@lru_cache(maxsize=32)
def _relayout_table(source: SequenceLayout, target: SequenceLayout, rank: int) -> MoveTable:
    return MoveTable.build(source, rank, [[target.positions(shard).numpy()] for shard in range(target.shards)])


@lru_cache(maxsize=32)
def _shift_table(layout: SequenceLayout, rows: tuple[Segments, ...], offset: int, rank: int) -> MoveTable:
    positions = [layout.positions(shard).numpy() for shard in range(layout.shards)]
    return MoveTable.build(
        layout, rank, [[row.ancestors(shard_positions, offset) for row in rows] for shard_positions in positions]
    )


@lru_cache(maxsize=32)
def _halo_table(
    layout: SequenceLayout, rows: tuple[Segments, ...], left: int, right: int, rank: int
) -> tuple[MoveTable, list[int]]:
    runs = [[runs_of(layout, shard, row) for row in rows] for shard in range(layout.shards)]
    needed_positions = [
        [
            np.concatenate([_surroundings(row, run, left, right) for run in row_runs])
            for row, row_runs in zip(rows, by_row, strict=True)
        ]
        for by_row in runs
    ]
    lengths = [left + len(run) + right for row_runs in runs[rank] for run in row_runs]
    return MoveTable.build(layout, rank, needed_positions), lengths


def _surroundings(segments: Segments, run: range, left: int, right: int) -> Integers:
    """Returns the positions of a run with its halo; -1 for tokens that do not exist."""
    tokens = np.arange(run.start, run.stop, run.step)
    before = [segments.ancestors(tokens[:1], distance) for distance in range(left, 0, -1)]
    after = [segments.ancestors(tokens[-1:], -distance) for distance in range(1, right + 1)]
    return np.concatenate([*before, tokens, *after])
