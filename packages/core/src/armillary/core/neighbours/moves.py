"""Access to tokens of other positions, on any layout: a new layout, shifted tokens, the tokens around a run.

    relayout            the same tokens, sharded by another layout
    shift               y at i = x at i - offset along the path: labels, token shift, multi-token prediction
    halo                each run of a shard with the tokens before and after it
    short_convolution   causal depthwise convolution, as in hybrid models

A *run* is a range of adjacent tokens of one document on one rank; in a striped layout each token is a run. Functions
take local tensors of this rank's tokens and a mesh axis, or DTensors that are sharded on that axis like the layout's
shards. They are differentiable. All ranks of the axis must call them in the same order, in forward and in backward.
If no rank needs a token of another, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import compat
from armillary.core.collectives.autograd import linear
from armillary.core.collectives.compiled import traced_axis
from armillary.core.collectives.token_moves import start_move, start_return
from armillary.core.layout import SequenceLayout
from armillary.core.mesh import Axis
from armillary.core.neighbours import graphs
from armillary.core.neighbours.convolution import convolve_runs
from armillary.core.neighbours.tables import (
    FLAT,
    TokenMove,
    check_layout,
    halo_table,
    relayout_table,
    shift_table,
    tokens_dim,
)
from armillary.core.segments import Segmented, check_left, segments_of
from armillary.core.validation import check_tensor, integer

Documents = Sequence[int] | Sequence[Sequence[int]] | Tensor | None


@compat.dtensors_outside_graphs
def relayout(
    x: Tensor, source: SequenceLayout, target: SequenceLayout, axis: DeviceMesh | Axis, dim: int = 1
) -> Tensor:
    """Moves tokens to their shards in another layout. Differentiable; takes integer tensors too.

    Args:
        x: [B, T, ...], this rank's tokens by `source`.
        source, target: layouts of the same length over the ranks of the axis.
        dim: the dim of the tokens.

    Returns:
        [B, T', ...], this rank's tokens by `target`.

    Bytes sent: this rank's tokens that change owner, kind "all_to_all"; backward the tokens that it received.

    Raises:
        ValueError: layouts, axis and x that do not match. Raised before any communication.
    """
    if source.length != target.length:
        raise ValueError(f"source has {source.length} tokens and target {target.length}; both need the same length")
    if torch.compiler.is_compiling():
        return graphs.relayout(x, source, target, traced_axis(axis), dim)
    mesh_axis = Axis.of(axis)
    for layout in (source, target):
        check_layout(layout, mesh_axis)
    if source == target:
        return x
    table = relayout_table(source, target, mesh_axis.rank)
    move = TokenMove(mesh_axis, table)
    return _on_local(x, lambda local: _move(local, dim, move), mesh_axis, dim, (source, target))


@compat.dtensors_outside_graphs
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
    integer("offset", offset)
    if torch.compiler.is_compiling():
        return graphs.shift(x, layout, traced_axis(axis), offset, documents, fill, dim, mask)
    mesh_axis, rows = Axis.of(axis), segments_of(layout.length, documents, mask)
    check_layout(layout, mesh_axis)
    check_left("offset", offset, rows)
    table = shift_table(layout, rows, offset, mesh_axis.rank)
    move = TokenMove(mesh_axis, table, len(rows), fill=fill)
    return _on_local(x, lambda local: _move(local, dim, move), mesh_axis, dim, (layout,))


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
    integer("left", left, 0)
    integer("right", right, 0)
    if compat.is_dtensor(x):
        raise ValueError("x is a DTensor; runs with their halos are no shards of one: pass x.to_local()")
    if torch.compiler.is_compiling():
        return graphs.halo(x, layout, traced_axis(axis), left, right, documents, dim, mask)
    mesh_axis, rows = Axis.of(axis), segments_of(layout.length, documents, mask)
    check_layout(layout, mesh_axis)
    check_left("right", -right, rows)
    table, lengths = halo_table(layout, rows, left, right, mesh_axis.rank)
    move = TokenMove(mesh_axis, table, len(rows))
    if len(rows) == 1:
        return _move(x, dim, move).split(lengths, dim)
    return tuple(run.unsqueeze(0) for run in _move(move.tokens(x, tokens_dim(x, dim)), FLAT, move).split(lengths))


@compat.dtensors_outside_graphs
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
    check_tensor("x", x)
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: [B, T, C] and [C, W] are needed")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)}: one number for each of the {weight.shape[0]} channels is needed")
    if torch.compiler.is_compiling():
        return graphs.short_convolution(x, weight, layout, traced_axis(axis), bias, documents, mask)
    mesh_axis, rows = Axis.of(axis), segments_of(layout.length, documents, mask)
    check_layout(layout, mesh_axis)
    table, lengths = halo_table(layout, rows, weight.shape[1] - 1, 0, mesh_axis.rank)

    move = TokenMove(mesh_axis, table, len(rows))

    def convolve(local: Tensor) -> Tensor:
        runs = _move(move.tokens(local, 1), FLAT, move)
        return convolve_runs(runs, weight, bias, lengths).view(local.shape)

    return _on_local(x, convolve, mesh_axis, 1, (layout,))


def _on_local(
    x: Tensor, function: Callable[[Tensor], Tensor], axis: Axis, dim: int, layouts: Sequence[SequenceLayout]
) -> Tensor:
    """Applies a function to a local tensor, or to the local tensor of a DTensor. The result has x's placements.

    Raises:
        ValueError: a DTensor that is not sharded on the axis along `dim`, or not in shards of these layouts' sizes.
    """
    if not compat.is_dtensor(x):
        return function(x)
    from armillary.core.collectives.dtensors import on_local_tokens

    return on_local_tokens(x, function, axis, dim, [layout.sizes for layout in layouts])


def _move(x: Tensor, dim: int, move: TokenMove) -> Tensor:
    """Moves tokens on a dim of a local tensor, differentiably."""
    if dim != FLAT:
        dim = tokens_dim(x, dim)
    return move.by_row(linear(move.tokens(x, dim), start_move, start_return, move.axis, move.table, move.fill), dim)
