"""Moves of tokens to other positions and ranks, for any layout.

    relayout            the same tokens, sharded by another layout
    shift               at each position i the token at i - offset of the same document: labels, multi-token prediction
    halo                each run of a shard with the tokens before and after it
    short_convolution   causal depthwise convolution, as in hybrid models

A *run* is a range of adjacent tokens of one document on one rank; in a striped layout each token is a run. In a prefix
tree, the token before a segment is the last one of its parent. The functions take this rank's tokens as a local tensor
or, except `halo`, a DTensor that the axis shards into the layout's sizes. They are differentiable. All ranks of the
axis must call them in the same order, in forward and in backward. If every rank has the tokens that it needs, nothing
is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import compat
from armillary.core.collectives.autograd import linear
from armillary.core.collectives.token_moves import start_move, start_return
from armillary.core.layout import SequenceLayout
from armillary.core.mesh import Axis
from armillary.core.neighbours import graphs
from armillary.core.neighbours.convolution import convolve_runs
from armillary.core.neighbours.tables import (
    FLAT,
    TokenMove,
    check_layout,
    halo_move,
    relayout_move,
    shift_move,
    tokens_dim,
)
from armillary.core.ops import traced_axis
from armillary.core.segments import Segmented
from armillary.core.validation import check_tensor, integer

Documents = Sequence[int] | Sequence[Sequence[int]] | Tensor | None
"""Document boundaries 0, end of the first, ..., N; or one list of boundaries per row."""


@compat.dtensors_outside_graphs
def relayout(
    x: Tensor, source: SequenceLayout, target: SequenceLayout, axis: DeviceMesh | Axis, dim: int = 1
) -> Tensor:
    """Moves tokens from their shards in `source` to their shards in `target`. Differentiable.

    Args:
        x: [B, T, ...], this rank's tokens in `source`; any dtype, integers too.
        source, target: layouts of the same length over the ranks of the axis.
        dim: the dim of the tokens.

    Returns:
        [B, T', ...], this rank's tokens in `target`.

    Bytes sent: this rank's tokens that change owner, kind "all_to_all"; in backward the tokens that it received.

    Raises:
        ValueError: layouts, axis or x that do not match. Raised before any communication.
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
    move = relayout_move(mesh_axis, source, target)
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
    """Returns, at each position i, the token of x at i - offset of the same document, or `fill` if there is none.

    Args:
        x: [B, T, ...], this rank's tokens.
        offset: number of tokens to look back, along the path of a tree; negative to look ahead (-1 for labels).
        documents: document boundaries; by default one document.
        mask: an attention mask of documents or of a tree, instead of `documents`.

    Bytes sent: each token of this rank once to every other rank that needs it, kind "all_to_all".

    Raises:
        ValueError: a negative offset in a tree, where a token may have several next tokens; arguments that do not
            match. Raised before any communication.
    """
    integer("offset", offset)
    if torch.compiler.is_compiling():
        return graphs.shift(x, layout, traced_axis(axis), offset, documents, fill, dim, mask)
    move = shift_move(Axis.of(axis), layout, documents, mask, offset, fill)
    return _on_local(x, lambda local: _move(local, dim, move), move.axis, dim, (layout,))


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
    """Returns each run of this rank's shard with its halo: `left` tokens before it and `right` after it.

    Tokens beyond the run's document are zeros.

    Args:
        x: [B, T, ...], this rank's tokens; local, because halos overlap.
        documents, dim, mask: as in `shift`.

    Returns:
        [B, left + n + right, ...] for each run of n tokens, in local order. If rows have different segments, the runs
        of row 0, then of row 1, and so on, with B = 1.

    Bytes sent: as `shift`.

    Raises:
        ValueError: a DTensor, a negative `left` or `right`, `right` above 0 in a tree, arguments that do not match.
            Raised before any communication.
    """
    integer("left", left, 0)
    integer("right", right, 0)
    if compat.is_dtensor(x):
        raise ValueError("x is a DTensor, but runs with halos overlap and have no placement; pass x.to_local()")
    if torch.compiler.is_compiling():
        return graphs.halo(x, layout, traced_axis(axis), left, right, documents, dim, mask)
    move = halo_move(Axis.of(axis), layout, documents, mask, left, right)
    # One exchange returns all runs, one after another, each with its halo.
    if move.rows == 1:
        return _move(x, dim, move).split(move.lengths, dim)
    runs = _move(move.tokens(x, tokens_dim(x, dim)), FLAT, move).split(move.lengths)
    return tuple(run.unsqueeze(0) for run in runs)


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
    """Causal depthwise convolution inside each document: y at i = bias + sum_w weight[:, w] x at i - (W - 1 - w).

    Args:
        x: [B, T, C], this rank's tokens.
        weight: [C, W], replicated, for C channels and W taps. The gradients of weight and bias are this rank's shares:
            sum them over the axis.
        bias: [C], replicated; None without a bias.
        documents, mask: as in `shift`.

    Returns:
        [B, T, C].

    Bytes sent: as `halo` with left = W - 1.

    Raises:
        ValueError: shapes, layout, axis or documents that do not match. Raised before any communication.
    """
    check_tensor("x", x)
    check_tensor("weight", weight)
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2] or not weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: [B, T, C] and [C, W >= 1] are needed")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)}: one number for each of the {weight.shape[0]} channels is needed")
    if torch.compiler.is_compiling():
        return graphs.short_convolution(x, weight, layout, traced_axis(axis), bias, documents, mask)
    # A window of W tokens needs a halo of W - 1 tokens before each run; then the convolution is local.
    move = halo_move(Axis.of(axis), layout, documents, mask, weight.shape[1] - 1, 0)

    def convolve(local: Tensor) -> Tensor:
        runs = _move(move.tokens(local, 1), FLAT, move)
        return convolve_runs(runs, weight, bias, move.lengths).view(local.shape)

    return _on_local(x, convolve, move.axis, 1, (layout,))


def _on_local(
    x: Tensor, function: Callable[[Tensor], Tensor], axis: Axis, dim: int, layouts: Sequence[SequenceLayout]
) -> Tensor:
    """Applies a function to a local tensor or a DTensor's local tensor. The result has the placements of `x`.

    Raises:
        ValueError: a DTensor that the axis does not shard along `dim`, or whose shards have other sizes than the
            layouts'.
    """
    if not compat.is_dtensor(x):
        return function(x)
    from armillary.core.dtensor import check_tokens, local_of, result_like

    for layout in layouts:
        check_tokens("x", x, [axis], dim, sizes=layout.sizes)
    return result_like(x, function(local_of(x)), x.shape)


def _move(x: Tensor, dim: int, move: TokenMove) -> Tensor:
    """Moves the tokens on `dim` of a local tensor. Differentiable."""
    # A move copies tokens, so it is linear. Its adjoint, `start_return`, sends the gradients of all copies to the owner
    # of the token and adds them.
    if dim != FLAT:
        dim = tokens_dim(x, dim)
    return move.by_row(linear(move.tokens(x, dim), start_move, start_return, move.axis, move.table, move.fill), dim)
