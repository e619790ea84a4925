"""Argument validation: functions return a value as a plain Python object, or raise ValueError.

Integers may also be numpy integers or tensors without dims; sequences may also be tensors or arrays. True is not
accepted for 1, 3.0 not for 3, and text for neither. Errors name the argument, its value and the accepted values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from numbers import Real
from operator import index
from typing import Any, cast

import torch
from torch import Tensor

from armillary.core import compat

MAX_COUNT = 2**53
"""Largest count in a file: more tokens or steps than any run has. JSON readers may round larger integers."""
Window = tuple[int | None, int | None]
"""(left, right) of a sliding window; None for an unbounded side."""
Boundaries = tuple[int, ...]
"""Document boundaries 0, end of the first document, ..., N."""


def integer(name: str, value: object, minimum: int | None = None) -> int:
    """Returns `value` as an int. Raises ValueError if it is not an integer, or is below `minimum`."""
    result = _as_int(value)
    if result is None or (minimum is not None and result < minimum):
        requirement = "" if minimum is None else f" of at least {minimum}"
        raise ValueError(f"{name}={_format(value)}: an integer{requirement} is needed")
    return result


def count(name: str, value: object, minimum: int = 0) -> int:
    """Returns a number from a file as an int from `minimum` to `MAX_COUNT`. Raises ValueError for others."""
    result = integer(name, value, minimum)
    if result > MAX_COUNT:
        raise ValueError(f"{name}={_format(value)}: at most 2^53 is possible")
    return result


def check_bool(name: str, value: object) -> bool:
    """Returns `value` as a bool. Raises ValueError unless it is True or False, of Python or of numpy."""
    if value is True or value is False:
        return value
    if type(value).__name__ in ("bool", "bool_") and getattr(value, "ndim", 1) == 0:  # numpy 2's name, numpy 1's name
        return bool(value)
    raise ValueError(f"{name}={_format(value)}: True or False is needed")


def number(name: str, value: object, hint: str = "") -> float:
    """Returns `value` as a finite float, or raises ValueError with `hint`."""
    # Tensors are refused too: the gradient of the value would be lost.
    result = math.nan
    if isinstance(value, (float, int, Real)) and not isinstance(value, (bool, Tensor)):
        try:
            result = value if type(value) is float else float(value)
        except OverflowError:  # an integer beyond the range of floats
            result = math.inf
    if not -math.inf < result < math.inf:
        raise ValueError(f"{name}={_format(value)}: a finite number is needed{hint}")
    return result


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={_format(value)}; known: {', '.join(choices)}")
    return value


def check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        hint = "; convert it with torch.as_tensor" if hasattr(value, "__array__") else ""
        raise ValueError(f"{name} is a {type(value).__name__}; a tensor is needed{hint}")
    if value.layout is not torch.strided:
        raise ValueError(f"{name} has layout {value.layout}; a dense (strided) tensor is needed")
    if value.is_nested:
        raise ValueError(
            f"{name} is a nested tensor; pass its values packed, [1, tokens, ...], and documents= in the mask"
        )


def check_local(name: str, value: object) -> None:
    check_tensor(name, value)
    if compat.is_dtensor(value):
        raise ValueError(f"{name} is a DTensor; pass the local tensor of this rank, {name}.to_local()")


def check_dim(name: str, x: Tensor, dim: int) -> int:
    """Returns `dim`, a dim of tensor `x`, counted from the start. Raises ValueError if `x` has no such dim."""
    if not -x.ndim <= integer("dim", dim) < x.ndim:
        raise ValueError(f"{name} {tuple(x.shape)} has no dim {dim}; its dims are 0..{x.ndim - 1}")
    return dim % x.ndim


def window_of(window: object) -> Window | None:
    """Returns the sliding window (left, right) of an attention mask; None if both sides are unbounded.

    Raises:
        ValueError: `window` is not a pair, or a side is neither None nor an integer of at least 0.
    """
    if window is None:
        return None
    sides = _elements(window)
    sides_or_none = [None if side is None else _as_int(side) for side in sides or ()]
    # `_as_int` returns None for values that are not integers, so a None here is an error unless the side is None.
    invalid = any(side is not None and (n is None or n < 0) for side, n in zip(sides or (), sides_or_none, strict=True))
    if len(sides_or_none) != 2 or invalid:
        raise ValueError(
            f"window {_format(window)} must be (left, right), such as (4095, 0): integers of at least 0, or "
            f"None for an unbounded side"
        )
    return None if sides_or_none == [None, None] else (sides_or_none[0], sides_or_none[1])


def documents_of(documents: object, length: int | None = None) -> Boundaries | tuple[Boundaries, ...] | None:
    """Returns one tuple of boundaries for all rows of a batch, or a tuple of such tuples, one for each row.

    Raises:
        ValueError: boundaries that are not integers from 0 (to `length`, if given), that fall, or whose documents are
            all empty.
    """
    # A repeated boundary in a tensor or array is an empty document, with which libraries pad cu_seqlens to a fixed
    # size: it is left out. A tensor [B, n] has no other way to say that rows have different numbers of documents. In a
    # list or tuple, which needs no padding, it is an error.
    if documents is None:
        return None
    values = _elements(documents)
    is_padded = not isinstance(documents, list | tuple)
    if not values or set(map(type, values)) == {int}:  # the usual case: one list of ints
        return boundaries_of(documents if values is None else values, length, repeats=is_padded)
    rows = [_elements(row) for row in values]
    if any(row is None for row in rows):  # numpy integers, or numbers mixed with lists, which `boundaries_of` refuses
        return boundaries_of(values, length, repeats=is_padded)
    padded_rows = [is_padded or not isinstance(row, list | tuple) for row in values]
    return tuple(boundaries_of(row, length, repeats=padded) for row, padded in zip(rows, padded_rows, strict=True))


def document_rows(documents: object, length: int) -> tuple[Boundaries, ...]:
    """Returns the boundaries of each row, or a single entry that holds for all rows; by default 0 and `length`."""
    rows = documents_of(documents, length)
    if rows is None:
        return ((0, length),)
    return tuple(row for row in rows if isinstance(row, tuple)) or (cast(Boundaries, rows),)


def boundaries_of(ends: object, length: int | None = None, *, repeats: bool = False) -> Boundaries:
    """Returns the boundaries of one row. `repeats` leaves out repeated ones, which are refused otherwise."""
    values = ends if isinstance(ends, (tuple, list)) else ()
    ends_or_none = [end if type(end) is int else _as_int(end) for end in cast("Sequence[object]", values)]
    integers = [end for end in ends_or_none if end is not None]
    only_integers = len(integers) == len(ends_or_none)
    if repeats:
        integers = [end for i, end in enumerate(integers) if not i or end != integers[i - 1]]
    invalid = not only_integers or len(integers) < 2 or integers[0] != 0 or any(a >= b for a, b in pairwise(integers))
    if invalid or length not in (None, integers[-1]):
        requirement = "start at 0 and rise" if length is None else f"rise from 0 to the length {length}"
        raise ValueError(
            f"document boundaries {_format(ends)} must {requirement}: integers 0, end of the first, "
            "..., N, or one list per row"
        )
    return tuple(integers)


def _as_int(value: object) -> int | None:
    if type(value) is int:
        return value
    if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool or getattr(value, "ndim", 0):
        return None
    try:  # numpy's integers and tensors without dims have __index__; floats and text do not
        return index(cast(Any, value))
    except TypeError:
        return None


def _elements(values: object) -> Sequence[object] | None:
    if isinstance(values, (tuple, list)):
        return cast("Sequence[object]", values)
    tolist = getattr(values, "tolist", None)
    if tolist is not None:
        elements = tolist()
        return cast("list[object]", elements) if isinstance(elements, list) else None
    iterable = isinstance(values, Iterable) and not isinstance(values, (str, bytes, dict))
    return list(cast("Iterable[object]", values)) if iterable else None


def _format(value: object) -> str:
    text = f"tensor {value.tolist()}" if isinstance(value, Tensor) and value.numel() <= 8 else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 96 else f"{text[:93]}..."
