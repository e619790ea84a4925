"""`neighbours.moves` inside `torch.compile` without a graph break: opaque ops, each with its gradient's op.

The arguments of an op are tensors, numbers and strings (`MoveKey`), from which the op looks up its table when the graph
runs. Documents and segments of a mask are passed as a tensor, so one graph serves all masks; other boundaries of
documents are a constant of the graph. `halo` is compiled for one mask, which decides how many tensors it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import index
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable

from armillary.core import compat
from armillary.core.collectives.compiled import TracedAxis, own_memory
from armillary.core.collectives.token_moves import start_move, start_return
from armillary.core.layout import SequenceLayout
from armillary.core.neighbours.convolution import convolve_runs
from armillary.core.neighbours.move_key import KEY_SCHEMA, MoveKey, documents_segments, layout_of_text
from armillary.core.neighbours.tables import FLAT, check_layout, halo_table, tokens_dim
from armillary.core.observe.ledger import phase
from armillary.core.segments import Segmented, Segments, check_lookahead

# -- functions of `neighbours.moves` on local tensors, while a graph is traced ----------------------------------------


def relayout(x: Tensor, source: SequenceLayout, target: SequenceLayout, axis: TracedAxis, dim: int) -> Tensor:
    for layout in (source, target):
        check_layout(layout, axis)
    if source.text == target.text:
        return x
    key = MoveKey.of("relayout", axis, source, None, None, target=target)
    return _move(x, tokens_dim(x, dim), target.sizes[axis.rank], False, *key)


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
    key = MoveKey.of("shift", axis, layout, documents, mask, (offset,), fill=fill)
    return _move(x, tokens_dim(x, dim), layout.sizes[axis.rank], False, *key)


def halo(
    x: Tensor,
    layout: SequenceLayout,
    axis: TracedAxis,
    left: int,
    right: int,
    documents: object,
    dim: int,
    mask: Segmented | None,
) -> tuple[Tensor, ...]:
    check_layout(layout, axis)
    key = MoveKey.of("halo", axis, layout, documents, mask, (left, right))
    # Reading the segments as integers makes them constants of the graph: it is compiled for this mask.
    segments = [] if mask is None else mask.segments(layout.length)
    ends = [[index(value) for value in row.ends] for row in segments]
    parents = [[index(value) for value in row.parents] for row in segments]
    text = _halo_lengths(key.layout, key.documents, ends, parents, left, right, axis.rank)
    rows, *lengths = [int(size) for size in text.split(",")]
    if rows > 1:
        runs = _move(x.flatten(0, 1), FLAT, sum(lengths), False, *key)
        return tuple(run.unsqueeze(0) for run in runs.split(lengths))
    return _move(x, tokens_dim(x, dim), sum(lengths), False, *key).split(lengths, dim)


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
    return _convolve(x, weight, bias, *MoveKey.of("halo", axis, layout, documents, mask, (weight.shape[1] - 1, 0)))[0]


# -- ops that move tokens ---------------------------------------------------------------------------------------------


def _phase(backward: bool) -> AbstractContextManager[Any]:
    # The ledger's phase is an argument of the op, because no context manager is active inside a graph.
    return phase("backward") if backward else nullcontext()


def _run_move(x: Tensor, dim: int, result_tokens: int, backward: bool, *key: Any) -> Tensor:
    move = MoveKey(*key).token_move(x)
    with _phase(backward):
        tokens = start_move(move.tokens(x, dim), move.axis, move.table, move.fill).wait()
    return own_memory(move.by_row(tokens, dim))


def _run_return(grad: Tensor, dim: int, result_tokens: int, backward: bool, *key: Any) -> Tensor:
    move = MoveKey(*key).token_move(grad)
    with _phase(backward):
        tokens = start_return(move.flat(grad, dim), move.axis, move.table).wait()
    return own_memory(move.by_row(tokens, dim))


def _fake_move(x: Tensor, dim: int, result_tokens: int, backward: bool, *key: Any) -> Tensor:
    """Returns an empty tensor with the shape of the result of either op, for tracing."""
    dim = 0 if dim == FLAT else dim
    return x.new_empty((*x.shape[:dim], result_tokens, *x.shape[dim + 1 :]))


class _Moved(torch.autograd.Function):
    """Autograd of `move_tokens` and `return_tokens`: each is the adjoint of the other."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        op: OpOverload,
        adjoint: OpOverload,
        dim: int,
        result_tokens: int,
        backward: bool,
        key: MoveKey,
    ) -> Tensor:
        ctx.adjoint, ctx.fields = adjoint, key[1:-1]  # without the mask's tensor and the fill, which is 0 in a gradient
        ctx.dim, ctx.tokens = dim, x.shape[max(dim, 0)]
        ctx.save_for_backward(key.mask_numbers)
        with compat.below_autograd():
            return op(x, dim, result_tokens, backward, *key)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (mask_numbers,) = ctx.saved_tensors
        grad = ctx.adjoint(grads[0], ctx.dim, ctx.tokens, True, mask_numbers, *ctx.fields, 0.0)
        return grad, *[None] * 6


def _move_differentiably(x: Tensor, dim: int, result_tokens: int, backward: bool, *key: Any) -> Tensor:
    call = _move, _return, dim, result_tokens, backward, MoveKey(*key)
    return cast(Tensor, cast(Any, _Moved).apply(x, *call))


def _return_differentiably(grad: Tensor, dim: int, result_tokens: int, backward: bool, *key: Any) -> Tensor:
    call = _return, _move, dim, result_tokens, backward, MoveKey(*key)
    return cast(Tensor, cast(Any, _Moved).apply(grad, *call))


_CALL = f"Tensor x, SymInt dim, SymInt result_tokens, bool backward, {KEY_SCHEMA}"
_move = compat.define_op(f"move_tokens({_CALL}) -> Tensor", _run_move, _fake_move, _move_differentiably)
_return = compat.define_op(f"return_tokens({_CALL}) -> Tensor", _run_return, _fake_move, _return_differentiably)


# dynamo cannot trace the tables. It takes the result as a constant, so arguments and result must be plain values.
@compat.constant_when_traced
def _halo_lengths(
    layout_text: str,
    documents: str,
    ends: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    left: int,
    right: int,
    rank: int,
) -> str:
    """Returns the number of rows with their own segments, then the length of each run with its halo, as text."""
    layout = layout_of_text(layout_text)
    rows = tuple(Segments(tuple(a), tuple(b)) for a, b in zip(ends, parents, strict=True))
    rows = rows or documents_segments(documents, layout.length)
    check_lookahead("right", -right, rows)
    return ",".join(map(str, (len(rows), *halo_table(layout, rows, left, right, rank)[1])))


# -- short convolution ------------------------------------------------------------------------------------------------


def _run_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *key: Any) -> list[Tensor]:
    """Returns the output, and the runs with their halos, flat [tokens, C], which are saved for backward."""
    # Backward needs the runs with their halos; saving them avoids a second exchange.
    move = MoveKey(*key).token_move(x)
    runs = start_move(move.tokens(x, 1), move.axis, move.table).wait()
    out = convolve_runs(runs, weight, bias, move.lengths)
    return [own_memory(out.view(x.shape)), own_memory(runs.flatten(0, -2))]


def _fake_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *key: Any) -> list[Tensor]:
    # The number of tokens in halos depends on the mask, which is a tensor without values while a graph is traced.
    return [x.new_empty(x.shape), x.new_empty((torch.library.get_ctx().new_dynamic_size(), x.shape[2]))]


def _run_convolve_backward(
    dout: Tensor, flat_runs: Tensor, weight: Tensor, bias: Tensor | None, *key: Any
) -> list[Tensor]:
    """Returns the gradients of x, of weight and, if there is one, of bias."""
    move = MoveKey(*key).token_move(dout)
    runs = flat_runs.unflatten(0, (-1, len(dout))) if move.rows == 1 else flat_runs
    # Recomputes the local convolution under autograd, then returns the gradients of halo tokens to their owners.
    leaves = [x.detach().requires_grad_() for x in (runs, weight, bias) if x is not None]
    with compat.above_autograd(), torch.enable_grad():
        runs_leaf, weight_leaf, *bias_leaf = leaves
        out = convolve_runs(runs_leaf, weight_leaf, bias_leaf[0] if bias_leaf else None, move.lengths)
        druns, *dparameters = torch.autograd.grad(out, leaves, dout.reshape(out.shape))
    with phase("backward"):
        dx = move.by_row(start_return(druns, move.axis, move.table).wait(), 1)
    return [*map(own_memory, (dx, *dparameters))]


def _fake_convolve_backward(
    dout: Tensor, flat_runs: Tensor, weight: Tensor, bias: Tensor | None, *key: Any
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (dout, weight, bias) if x is not None]


class _Convolved(torch.autograd.Function):
    """Autograd of `short_convolution`."""

    @staticmethod
    def forward(ctx: Any, key: MoveKey, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        with compat.below_autograd():
            out, runs = _convolve(x, weight, bias, *key)
        ctx.fields = key[1:]
        ctx.save_for_backward(key.mask_numbers, runs, weight, bias)
        ctx.mark_non_differentiable(runs)
        # Autograd would otherwise create a zero gradient for `runs`, whose size is not known while tracing.
        ctx.set_materialize_grads(False)
        return out, runs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        mask_numbers, runs, weight, bias = ctx.saved_tensors
        if grads[0] is None:
            return None, None, None, None
        tensor_grads = _convolve_backward(grads[0], runs, weight, bias, mask_numbers, *ctx.fields)
        return None, *tensor_grads, *([None] if bias is None else [])


def _convolve_differentiably(x: Tensor, weight: Tensor, bias: Tensor | None, *key: Any) -> list[Tensor]:
    if not any(y is not None and y.requires_grad for y in (x, weight, bias)):  # saves nothing for backward
        with compat.below_autograd():
            return _convolve(x, weight, bias, *key)
    return list(cast(Any, _Convolved).apply(MoveKey(*key), x, weight, bias))


_convolve = compat.define_op(
    f"short_convolution(Tensor x, Tensor weight, Tensor? bias, {KEY_SCHEMA}) -> Tensor[]",
    _run_convolve,
    _fake_convolve,
    _convolve_differentiably,
)
_convolve_backward = compat.define_op(
    f"short_convolution_backward(Tensor dout, Tensor flat_runs, Tensor weight, Tensor? bias, {KEY_SCHEMA}) -> Tensor[]",
    _run_convolve_backward,
    _fake_convolve_backward,
)
