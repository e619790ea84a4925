"""Moves of tokens to other positions and ranks, for any layout.

    relayout            the same tokens, sharded by another layout
    shift               at each position i the token at i - offset of the same document: labels, multi-token prediction
    halo                each run of a shard with the tokens before and after it
    short_convolution   causal depthwise convolution, as in hybrid models

A *run* is a range of adjacent tokens of one document on one rank; in a striped layout each token is a run. In a prefix
tree, the token before a segment is the last one of its parent. The functions take this rank's tokens as a local tensor
or, except `halo`, a DTensor that the axis shards into the layout's sizes. They are differentiable. All ranks of the
axis must call them in the same order, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from armillary.core import compat
from armillary.core.argument_checks import check_tensor, integer
from armillary.core.collectives.collective import linear
from armillary.core.graph_ops import TracedAxis, define_linear, define_pair, traced_axis
from armillary.core.layout import SequenceLayout
from armillary.core.mesh import Axis
from armillary.core.slices import Segmented, Segments, check_lookahead, segments_of
from armillary.core.token_move_tables import (
    FLAT,
    TokenMove,
    check_shards,
    halo_move,
    halo_table,
    relayout_move,
    shift_move,
    start_move,
    start_return,
    tokens_dim,
)

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
    traced = torch.compiler.is_compiling()
    call_axis = traced_axis(axis) if traced else Axis.of(axis)
    for layout in (source, target):
        check_shards(layout, call_axis)
    if source.text == target.text:
        return x
    if not isinstance(call_axis, Axis):
        sizes = target.sizes
        return _traced_move(x, tokens_dim(x, dim), sizes[call_axis.rank], False, "relayout", call_axis, source, target)
    move = relayout_move(call_axis, source, target)
    return _on_local(x, lambda local: _move(local, dim, move), call_axis, dim, (source, target))


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
        traced = traced_axis(axis)
        check_shards(layout, traced)
        arguments = "shift", traced, layout, documents, mask, offset, float(fill)
        return _traced_move(x, tokens_dim(x, dim), layout.sizes[traced.rank], False, *arguments)
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
        return _traced_halo(x, layout, traced_axis(axis), left, right, documents, dim, mask)
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
        traced = traced_axis(axis)
        check_shards(layout, traced)
        tensors = [x, weight, bias]
        return _traced_convolution(tensors, traced, layout, documents, mask, weight.shape[1] - 1, 0)[0]
    # A window of W tokens needs a halo of W - 1 tokens before each run; then the convolution is local.
    move = halo_move(Axis.of(axis), layout, documents, mask, weight.shape[1] - 1, 0)

    def convolve(local: Tensor) -> Tensor:
        runs = _move(move.tokens(local, 1), FLAT, move)
        return convolve_runs(runs, weight, bias, move.lengths).view(local.shape)

    return _on_local(x, convolve, move.axis, 1, (layout,))


def _on_local(
    x: Tensor, function: Callable[[Tensor], Tensor], axis: Axis, dim: int, layouts: Sequence[SequenceLayout]
) -> Tensor:
    """Applies a function to a local tensor, or to that of a DTensor sharded like the layouts. Keeps placements."""
    if not compat.is_dtensor(x):
        return function(x)
    from armillary.core.dtensor import check_tokens, local_of, result_like

    for layout in layouts:
        check_tokens("x", x, [axis], dim, sizes=layout.sizes)
    return result_like(x, function(local_of(x)), x.shape)


def _move(x: Tensor, dim: int, move: TokenMove) -> Tensor:
    # A move copies tokens, so it is linear. Its adjoint, `start_return`, sends the gradients of all copies to the owner
    # of the token and adds them.
    if dim != FLAT:
        dim = tokens_dim(x, dim)
    return move.by_row(linear(move.tokens(x, dim), start_move, start_return, move.axis, move.table, move.fill), dim)


def convolve_runs(runs: Tensor, weight: Tensor, bias: Tensor | None, lengths: Sequence[int]) -> Tensor:
    """Returns the causal depthwise convolution [B, T, C] at the tokens of all runs.

    Args:
        runs: [sum(lengths), B, C], or [sum(lengths), C] with B = 1; each run begins with its W - 1 halo tokens.
    """
    # One convolution over all runs. Outputs at halo tokens mix two runs, and are dropped.
    channels = runs.permute(1, 2, 0) if runs.ndim == 3 else runs.T.unsqueeze(0)  # [B, C, sum(lengths)]
    convolved = F.conv1d(channels, weight.unsqueeze(1), bias, groups=weight.shape[0]).movedim(2, 1)
    starts, halo = accumulate(lengths, initial=0), weight.shape[1] - 1
    outputs = torch.cat([torch.arange(a, a + n - halo) for a, n in zip(starts, lengths, strict=False)])
    return convolved.index_select(1, outputs.to(convolved.device))


# -- ops of torch.compile ---------------------------------------------------------------------------------------------

# An op moves tokens when the graph runs, without a graph break. The tensor of a layout or of a mask is an input of the
# graph, so one graph serves all lengths and masks. Boundaries of documents that are no mask are constants of the graph.
# `halo` is compiled for one mask, which decides how many tensors it returns.

MOVES = {"relayout": relayout_move, "shift": shift_move, "halo": halo_move}
"""The functions that make a `TokenMove`, by the name that an op takes."""


def _run_move(x: Tensor, dim: int, is_flat: bool, name: str, *arguments: Any) -> Tensor:
    move, dim = MOVES[name](*arguments), FLAT if is_flat else dim
    return move.by_row(start_move(move.tokens(x, dim), move.axis, move.table, move.fill).wait(), dim)


def _run_return(grad: Tensor, dim: int, is_flat: bool, name: str, *arguments: Any) -> Tensor:
    move, dim = MOVES[name](*arguments), FLAT if is_flat else dim
    return move.by_row(start_return(move.flat(grad, dim), move.axis, move.table).wait(), dim)


_traced_move = define_linear("move_tokens", _run_move, _run_return)


def _traced_halo(
    x: Tensor,
    layout: SequenceLayout,
    axis: TracedAxis,
    left: int,
    right: int,
    documents: Any,
    dim: int,
    mask: Segmented | None,
) -> tuple[Tensor, ...]:
    check_shards(layout, axis)
    arguments = "halo", axis, layout, documents, mask, left, right
    # Reading the segments as integers makes them constants of the graph: it is compiled for this mask.
    segments = [] if mask is None else mask.segments(layout.length)
    ends = [[index(value) for value in row.ends] for row in segments]
    parents = [[index(value) for value in row.parents] for row in segments]
    text = _halo_lengths(layout.text, documents, ends, parents, left, right, axis.rank)
    rows, *lengths = [int(size) for size in text.split(",")]
    if rows > 1:
        runs = _traced_move(x.flatten(0, 1), 0, sum(lengths), True, *arguments)
        return tuple(run.unsqueeze(0) for run in runs.split(lengths))
    return _traced_move(x, tokens_dim(x, dim), sum(lengths), False, *arguments).split(lengths, dim)


# dynamo cannot trace the tables. It takes the result as a constant, so arguments and result must be plain values.
@compat.constant_when_traced
def _halo_lengths(
    layout_text: str,
    documents: Any,
    ends: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    left: int,
    right: int,
    rank: int,
) -> str:
    """Returns the number of rows with their own segments, then the length of each run with its halo, as text."""
    layout = SequenceLayout.read(layout_text)
    rows = tuple(Segments(tuple(a), tuple(b)) for a, b in zip(ends, parents, strict=True))
    rows = rows or segments_of(layout.length, documents)
    check_lookahead("right", -right, rows)
    return ",".join(map(str, (len(rows), *halo_table(layout, rows, left, right, rank)[1])))


def _run_convolve(tensors: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    # Backward needs the runs with their halos, flat [tokens, C]: saving them avoids a second exchange.
    (x, weight, bias), move = tensors, halo_move(*arguments)
    runs = start_move(move.tokens(x, 1), move.axis, move.table).wait()
    return [convolve_runs(runs, weight, bias, move.lengths).view(x.shape), runs.flatten(0, -2)]


def _fake_convolve(tensors: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    # The number of tokens in halos depends on the mask, which is a tensor without values while a graph is traced.
    x = tensors[0]
    return [x.new_empty(x.shape), x.new_empty((torch.library.get_ctx().new_dynamic_size(), x.shape[2]))]


def _run_convolve_backward(grads: Sequence[Tensor], saved: Sequence[Tensor | None], *arguments: Any) -> list[Tensor]:
    (dout,), (flat_runs, *parameters), move = grads, saved, halo_move(*arguments)
    assert flat_runs is not None
    runs = flat_runs.unflatten(0, (-1, len(dout))) if move.rows == 1 else flat_runs
    # Recomputes the local convolution under autograd, then returns the gradients of halo tokens to their owners.
    leaves = [x.detach().requires_grad_() for x in (runs, *parameters) if x is not None]
    with compat.above_autograd(), torch.enable_grad():
        runs_leaf, weight_leaf, *bias_leaf = leaves
        out = convolve_runs(runs_leaf, weight_leaf, bias_leaf[0] if bias_leaf else None, move.lengths)
        druns, *dparameters = torch.autograd.grad(out, leaves, dout.reshape(out.shape))
    return [move.by_row(start_return(druns, move.axis, move.table).wait(), 1), *dparameters]


def _fake_convolve_backward(grads: Sequence[Tensor], saved: Sequence[Tensor | None], *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (grads[0], *saved[1:]) if x is not None]


_traced_convolution = define_pair(
    "short_convolution",
    _run_convolve,
    _run_convolve_backward,
    _fake_convolve,
    _fake_convolve_backward,
    lambda tensors, results: (results[1], *tensors[1:]),
)
