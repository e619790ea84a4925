"""Ops that take Python objects: how a call of armillary enters a graph of torch.compile without a break.

While a graph is traced, `pack` turns the objects of a call into tensors, numbers and strings. When the graph runs,
`unpack` rebuilds the objects, and the op runs the same functions as eager mode.

    object                      in the graph                                 another value needs
    None, bool, str             text                                         another graph
    boundaries of documents     text                                         another graph
    registered object           a number (`register`)                        another graph
    axis                        text: its name, device type and group        another graph
    float                       a number                                     another graph
    int                         a number                                     once another graph, with a symbol
    mask                        numbers: its sides; a tensor: the remainder  as int; for the remainder none
    layout                      a tensor                                     no other graph
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import count
from typing import Any, ClassVar, NamedTuple, Protocol, Self, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import compat
from armillary.core.layout import SequenceLayout
from armillary.core.ledger import phase
from armillary.core.mesh import Axis
from armillary.core.slices import Segmented

# -- objects that a graph refers to by name or number -----------------------------------------------------------------

_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()
_ids = count()


def register(value: object) -> int:
    """Registers an object, without keeping it alive, and returns its number, under which an op finds it."""
    number = next(_ids)
    _objects[number] = value
    return number


def object_of(number: int) -> Any:
    return _objects[number]


def register_as_tensor(value: object) -> Tensor:
    """Registers an object and returns its number as a tensor."""
    # torch.compile specializes a graph to an integer but not to the value of a tensor, so equal modules share a graph.
    return torch.tensor(register(value), device="cpu")


class TraceableMask(Segmented, Protocol):
    """A mask that is passed into a compiled graph as its fields, and constructed again when the graph runs."""

    reference: ClassVar[str]
    """The class, as "module:name"."""
    numbers: Tensor | None
    """Fields of any length, as int64; None if there are none."""

    @property
    def sides(self) -> Sequence[int]:
        """All fields that are not in `numbers`."""
        ...

    @classmethod
    def read(cls, sides: Sequence[int], numbers: Tensor | None) -> Self:
        """Returns the mask with these `sides` and `numbers`. Equal arguments give the same object."""
        ...


class TracedAxis(NamedTuple):
    """An axis as constants of a traced graph. `group` is the name of its process group; "" for `Axis.alone`."""

    name: str
    rank: int
    size: int
    device: str
    group: str


def traced_axis(axis: DeviceMesh | Axis) -> TracedAxis:
    """Returns the axis of a 1-D mesh while a graph is traced, where `Axis.of` cannot read the mesh."""
    if isinstance(axis, Axis):
        has_group = axis.group is not None  # pyright: ignore[reportUnnecessaryComparison] - None for `Axis.alone`
        return TracedAxis(axis.name, axis.rank, axis.size, axis.device, axis.group.group_name if has_group else "")
    name, rank, size, device, group = _axis_text(axis).split("|", 4)
    return TracedAxis(name, int(rank), int(size), device, group)


@compat.constant_when_traced
def _axis_text(mesh: DeviceMesh) -> str:
    # As one string, because dynamo makes a string a constant of the graph.
    axis = Axis.of(compat.traced_object(mesh))
    return f"{axis.name}|{axis.rank}|{axis.size}|{axis.device}|{axis.group.group_name}"


def _read_axis(text: str) -> Axis:
    name, device, group_name = text.split("|", 2)
    if not group_name:
        return Axis.alone(name)
    group = compat.find_group(group_name)
    return Axis(name, dist.get_rank(group), group.size(), group, compat.host_timeout(group, device), device)


# -- objects as arguments of an op ------------------------------------------------------------------------------------


class OpArguments(NamedTuple):
    """The last arguments of an op, from which it reads its objects: `SCHEMA`.

    Args:
        tensors: values that graphs take as inputs.
        numbers, floats: values that graphs specialize to, or make symbols.
        text: one line for each object, "kind:detail"; "" for a registered object alone, whose number is in `numbers`.
    """

    tensors: Sequence[Tensor | None]
    numbers: Sequence[int]
    floats: Sequence[float]
    text: str


SCHEMA = "Tensor?[] object_tensors, SymInt[] numbers, float[] floats, str text"


def pack(*values: Any) -> OpArguments:
    """Returns the arguments for objects of the kinds above; the inverse of `unpack`. torch.compile traces it."""
    tensors: list[Tensor | None] = []
    numbers: list[int] = []
    floats: list[float] = []
    lines: list[str] = []
    for value in values:
        if value is None:
            lines.append("none")
        elif isinstance(value, bool):
            lines.append("bool:1" if value else "bool:")
        elif isinstance(value, int):
            lines.append("int")
            numbers.append(value)
        elif isinstance(value, float):
            lines.append("float")
            floats.append(value)
        elif isinstance(value, str):
            lines.append("str:" + value)
        elif isinstance(value, TracedAxis):
            lines.append(f"axis:{value.name}|{value.device}|{value.group}")
        elif isinstance(value, SequenceLayout):
            lines.append("layout")
            tensors.append(value.numbers)
        elif isinstance(value, (list, tuple)):
            lines.append("documents:" + _documents_text(cast("Sequence[Any]", value)))
        elif not isinstance(value, Tensor) and hasattr(value, "registered_id"):
            lines.append("object")
            numbers.append(value.registered_id)
        elif not isinstance(value, Tensor) and hasattr(value, "reference"):
            sides = value.sides
            lines.append("mask:" + value.reference)
            tensors.append(value.numbers)
            numbers += [len(sides), *sides]
        else:
            raise ValueError(
                f"a {type(value).__name__} cannot enter a graph of torch.compile; documents are accepted as boundaries "
                "that are integers, or in an attention mask"
            )
    return OpArguments(tensors, numbers, floats, "\n".join(lines))


def pack_registered(number: int) -> OpArguments:
    # A registered object alone costs less. For eager mode, where a call is an op so that selective checkpointing can
    # save its results.
    return OpArguments((), (number,), (), "")


def unpack(arguments: OpArguments, shapes_only: bool = False) -> list[Any]:
    """Returns the objects of `pack`; axes as `Axis`. `shapes_only` leaves masks and layouts None."""
    # While a graph is traced, the tensors of masks and layouts have no values, and reading the sides of a mask, which
    # may be symbols, would specialize the graph to them.
    if not arguments.text:
        return [object_of(arguments.numbers[0])]
    tensors, numbers, floats = iter(arguments.tensors), iter(arguments.numbers), iter(arguments.floats)
    values: list[Any] = []
    for kind, detail in _lines(arguments.text):
        if kind == "int":
            values.append(next(numbers))
        elif kind == "object":
            values.append(object_of(int(next(numbers))))  # `int` specializes the graph to the number
        elif kind == "float":
            values.append(next(floats))
        elif kind == "layout":
            encoded: Any = next(tensors)
            values.append(None if shapes_only else _layout_of_bytes(encoded.numpy().tobytes()))
        elif kind == "mask":
            encoded, sides = next(tensors), [next(numbers) for _ in range(int(next(numbers)))]
            values.append(None if shapes_only else _mask_class(detail).read(sides, encoded))
        else:
            values.append(_READERS[kind](detail))
    return values


@lru_cache(maxsize=256)
def _lines(text: str) -> list[tuple[str, str]]:
    return [(kind, detail) for kind, _, detail in (line.partition(":") for line in text.split("\n"))]


@lru_cache(maxsize=256)
def _layout_of_bytes(encoded: bytes) -> SequenceLayout:
    return SequenceLayout.of_numbers(np.frombuffer(encoded, dtype=np.int64).tolist())


@lru_cache
def _mask_class(reference: str) -> type[TraceableMask]:
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def _documents_text(documents: Sequence[Any]) -> str:
    # [0, 10, 24] for all rows is "0,10,24"; [[0, 24]] for each row is "0,24;". So [[0, 24]], for a batch of one row,
    # differs from [0, 24].
    rows = [documents] if isinstance(documents[0], int) else documents
    return "".join([",".join([str(end) for end in row]) + ("" if row is documents else ";") for row in rows])


def _read_documents(text: str) -> list[int] | list[list[int]]:
    rows = [[int(end) for end in row.split(",")] for row in text.split(";") if row]
    return rows if ";" in text else rows[0]


_READERS: dict[str, Callable[[str], Any]] = {
    "none": lambda _: None,
    "bool": bool,
    "str": str,
    "documents": _read_documents,
    "axis": _read_axis,
}

# -- ops --------------------------------------------------------------------------------------------------------------


def own_memory(x: Tensor) -> Tensor:
    """Returns `x` in the form that results of ops must have: contiguous, alone in its storage, and not a view."""
    # Autograd lets callers write in place to a result that is not a view.
    # If x is a part of a larger buffer, it is copied.
    fills_storage = x.untyped_storage().nbytes() == x.nbytes
    result = x.contiguous() if fills_storage else x.clone(memory_format=torch.contiguous_format)
    return compat.no_view(result) if result._is_view() else result


def define_op(
    name: str,
    tensors: str,
    run: Callable[..., list[Tensor]],
    fake: Callable[..., list[Tensor]],
    differentiable: Callable[..., list[Tensor]] | None = None,
) -> OpOverload:
    """Defines an op that takes tensors and the fields of `OpArguments`, and returns a list of new tensors.

    Args:
        tensors: schema of the tensors, such as "Tensor x, Tensor? bias".
        run: the implementation; takes the tensors and the objects. Its results are as `own_memory` returns them.
        fake: takes the same, without masks and layouts (`unpack`), and returns empty tensors shaped like the results.
        differentiable: the implementation under autograd; takes the arguments of the op.
    """
    count = len(OpArguments._fields)

    def run_unpacked(*values: Any) -> list[Tensor]:
        return run(*values[:-count], *unpack(OpArguments(*values[-count:])))

    def fake_unpacked(*values: Any) -> list[Tensor]:
        return fake(*values[:-count], *unpack(OpArguments(*values[-count:]), shapes_only=True))

    schema = f"{name}({tensors}, {SCHEMA}) -> Tensor[]"
    return compat.define_op(schema, run_unpacked, fake_unpacked, differentiable)


def define_pair(
    name: str,
    run: Callable[..., Iterable[Tensor]],
    run_backward: Callable[..., Iterable[Tensor]],
    fake: Callable[..., list[Tensor]],
    fake_backward: Callable[..., list[Tensor]],
    saved: Callable[[Sequence[Tensor | None], Sequence[Tensor]], Sequence[Tensor | None]],
    outputs: int = 1,
) -> Callable[..., list[Tensor]]:
    """Returns a differentiable function of (tensors, *objects), which torch.compile traces into the graph as an op.

    Args:
        name: name of the op. The op of its gradient is `name`_backward.
        run: takes (tensors, *objects), and returns the results.
        run_backward: takes (gradients of the first `outputs` results, saved tensors, *objects), and returns the
            gradients of the tensors that are not None, in order. The gradient of a result is None if it has none. Runs
            in the ledger's phase "backward".
        fake, fake_backward: take the same, without masks and layouts (`unpack`), and return empty tensors shaped like
            the results.
        saved: takes (tensors, results), and returns the tensors that backward needs.
        outputs: number of differentiable results. They come first.
    """

    def run_alone(*arguments: Any) -> list[Tensor]:
        return [own_memory(x) for x in run(*arguments)]

    def run_backward_alone(*arguments: Any) -> list[Tensor]:
        with phase("backward"):
            return [own_memory(x) for x in run_backward(*arguments)]

    def differentiable(tensors: Sequence[Tensor | None], *fields: Any) -> list[Tensor]:
        if any(x is not None and x.requires_grad for x in tensors):
            pair = forward, backward, saved, outputs
            return list(cast(Any, _Differentiable).apply(pair, OpArguments(*fields), *tensors))
        with compat.below_autograd():  # without the Function, which torch.func's transforms do not support
            return forward(tensors, *fields)

    forward = define_op(name, "Tensor?[] tensors", run_alone, fake, differentiable)
    backward = define_op(f"{name}_backward", "Tensor?[] grads, Tensor?[] saved", run_backward_alone, fake_backward)

    def call(tensors: Sequence[Tensor | None], *objects: Any) -> list[Tensor]:
        return forward(list(tensors), *pack(*objects))

    return call


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pair: tuple[Any, ...], arguments: OpArguments, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        op, ctx.op_backward, saved, ctx.outputs = pair
        with compat.below_autograd():  # above it, the op would dispatch to its autograd kernel, which calls this
            results = op(tensors, *arguments)
        ctx.fields, ctx.count, ctx.present = arguments[1:], len(arguments.tensors), [x is not None for x in tensors]
        ctx.save_for_backward(*arguments.tensors, *saved(tensors, results))
        ctx.mark_non_differentiable(*results[ctx.outputs :])
        # Autograd would otherwise create zero gradients, also for results whose size is not known while tracing.
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if all(grad is None for grad in grads):
            return None, None, *[None] * len(ctx.present)
        object_tensors, saved = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        tensor_grads = iter(ctx.op_backward(grads[: ctx.outputs], saved, object_tensors, *ctx.fields))
        return None, None, *[next(tensor_grads) if present else None for present in ctx.present]


def define_linear(name: str, run: Callable[..., Tensor], adjoint: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a differentiable function of (x, dim, tokens, *objects), an op that changes the size of x on one dim.

    Args:
        run: takes (x, dim, *objects), and returns a tensor of size `tokens` on `dim`.
        adjoint: takes (gradient, dim, *objects), and returns the gradient of x.
    """

    def resized(x: Tensor, dim: int, tokens: int) -> list[Tensor]:
        return [x.new_empty((*x.shape[:dim], tokens, *x.shape[dim + 1 :]))]

    def forward(tensors: Sequence[Tensor], dim: int, before: int, after: int, *objects: Any) -> list[Tensor]:
        return [run(tensors[0], dim, *objects)]

    def backward(
        grads: Sequence[Tensor], saved: Sequence[Tensor], dim: int, before: int, after: int, *objects: Any
    ) -> list[Tensor]:
        return [adjoint(grads[0], dim, *objects)]

    def fake(tensors: Sequence[Tensor], dim: int, before: int, after: int, *objects: Any) -> list[Tensor]:
        return resized(tensors[0], dim, after)

    def fake_backward(
        grads: Sequence[Tensor], saved: Sequence[Tensor], dim: int, before: int, after: int, *objects: Any
    ) -> list[Tensor]:
        return resized(grads[0], dim, before)

    def call(x: Tensor, dim: int, tokens: int, *objects: Any) -> Tensor:
        return pair([x], dim, x.shape[dim], tokens, *objects)[0]

    pair = define_pair(name, forward, backward, fake, fake_backward, lambda tensors, results: ())
    return call
