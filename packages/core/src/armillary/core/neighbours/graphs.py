"""`neighbours.moves` inside `torch.compile` without a graph break: ops that move tokens when the graph runs.

The tensor of a layout or of a mask is an input of the graph, so one graph serves all lengths and masks. Boundaries of
documents that are no mask are constants of the graph. `halo` is compiled for one mask, which decides how many tensors
it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from armillary.core import compat
from armillary.core.collectives.token_moves import start_move, start_return
from armillary.core.layout import SequenceLayout
from armillary.core.neighbours.convolution import convolve_runs
from armillary.core.neighbours.tables import (
    FLAT,
    check_layout,
    halo_move,
    halo_table,
    relayout_move,
    shift_move,
    tokens_dim,
)
from armillary.core.ops import TracedAxis, define_linear, define_pair
from armillary.core.segments import Segmented, Segments, check_lookahead, segments_of

MOVES = {"relayout": relayout_move, "shift": shift_move, "halo": halo_move}
"""The functions that make a `TokenMove`, by the name that an op takes."""


def _run_move(x: Tensor, dim: int, is_flat: bool, name: str, *arguments: Any) -> Tensor:
    move, dim = MOVES[name](*arguments), FLAT if is_flat else dim
    return move.by_row(start_move(move.tokens(x, dim), move.axis, move.table, move.fill).wait(), dim)


def _run_return(grad: Tensor, dim: int, is_flat: bool, name: str, *arguments: Any) -> Tensor:
    move, dim = MOVES[name](*arguments), FLAT if is_flat else dim
    return move.by_row(start_return(move.flat(grad, dim), move.axis, move.table).wait(), dim)


_move = define_linear("move_tokens", _run_move, _run_return)


def relayout(x: Tensor, source: SequenceLayout, target: SequenceLayout, axis: TracedAxis, dim: int) -> Tensor:
    for layout in (source, target):
        check_layout(layout, axis)
    if source.text == target.text:
        return x
    return _move(x, tokens_dim(x, dim), target.sizes[axis.rank], False, "relayout", axis, source, target)


def shift(
    x: Tensor,
    layout: SequenceLayout,
    axis: TracedAxis,
    offset: int,
    documents: object,
    fill: float,
    dim: int,
    mask: Segmented | None,
) -> Tensor:
    check_layout(layout, axis)
    move = "shift", axis, layout, documents, mask, offset, float(fill)
    return _move(x, tokens_dim(x, dim), layout.sizes[axis.rank], False, *move)


def halo(
    x: Tensor,
    layout: SequenceLayout,
    axis: TracedAxis,
    left: int,
    right: int,
    documents: Any,
    dim: int,
    mask: Segmented | None,
) -> tuple[Tensor, ...]:
    check_layout(layout, axis)
    move = "halo", axis, layout, documents, mask, left, right
    # Reading the segments as integers makes them constants of the graph: it is compiled for this mask.
    segments = [] if mask is None else mask.segments(layout.length)
    ends = [[index(value) for value in row.ends] for row in segments]
    parents = [[index(value) for value in row.parents] for row in segments]
    text = _halo_lengths(layout.text, documents, ends, parents, left, right, axis.rank)
    rows, *lengths = [int(size) for size in text.split(",")]
    if rows > 1:
        runs = _move(x.flatten(0, 1), 0, sum(lengths), True, *move)
        return tuple(run.unsqueeze(0) for run in runs.split(lengths))
    return _move(x, tokens_dim(x, dim), sum(lengths), False, *move).split(lengths, dim)


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


# -- short convolution ------------------------------------------------------------------------------------------------


def short_convolution(
    x: Tensor,
    weight: Tensor,
    layout: SequenceLayout,
    axis: TracedAxis,
    bias: Tensor | None,
    documents: object,
    mask: Segmented | None,
) -> Tensor:
    check_layout(layout, axis)
    return _convolve([x, weight, bias], axis, layout, documents, mask, weight.shape[1] - 1, 0)[0]


def _run_convolve(tensors: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    """Returns the output, and the runs with their halos, flat [tokens, C], which are saved for backward."""
    # Backward needs the runs with their halos; saving them avoids a second exchange.
    (x, weight, bias), move = tensors, halo_move(*arguments)
    runs = start_move(move.tokens(x, 1), move.axis, move.table).wait()
    return [convolve_runs(runs, weight, bias, move.lengths).view(x.shape), runs.flatten(0, -2)]


def _fake_convolve(tensors: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    # The number of tokens in halos depends on the mask, which is a tensor without values while a graph is traced.
    x = tensors[0]
    return [x.new_empty(x.shape), x.new_empty((torch.library.get_ctx().new_dynamic_size(), x.shape[2]))]


def _run_convolve_backward(grads: Sequence[Tensor], saved: Sequence[Tensor | None], *arguments: Any) -> list[Tensor]:
    """Returns the gradients of x, of weight and, if there is one, of bias."""
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


_convolve = define_pair(
    "short_convolution",
    _run_convolve,
    _run_convolve_backward,
    _fake_convolve,
    _fake_convolve_backward,
    lambda tensors, results: (results[1], *tensors[1:]),
)
