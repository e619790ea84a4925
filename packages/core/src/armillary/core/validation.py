"""Arguments as the code behind them takes them: numbers and masks by value, whatever holds them; all else is refused.

Integers may come as numpy's, or in tensors without dims; sequences of them as tensors or arrays too. What only looks
like one is refused, with its value and what would do: True for 1, 3.0 for 3, and any text.
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

Window = tuple[int | None, int | None]
Boundaries = tuple[int, ...]


def integer(name: str, value: object, least: int | None = None) -> int:
    """`value` as an int, no less than `least`.

    Raises:
        ValueError: with the name and the value.
    """
    found = _index(value)
    if found is None or (least is not None and found < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name}={_shown(value)}: an integer{bound} is needed")
    return found


def flag(name: str, value: object) -> bool:
    """`value` as a bool: True or False, numpy's too.

    Raises:
        ValueError: with the name and the value.
    """
    if value is True or value is False:
        return value
    if type(value).__name__ in ("bool", "bool_") and getattr(value, "ndim", 1) == 0:
        return bool(value)
    raise ValueError(f"{name}={_shown(value)}: True or False is needed")


def number(name: str, value: object, hint: str = "") -> float:
    """Returns `value` as a finite float. A tensor is refused: its gradient would be lost.

    Raises:
        ValueError: with the name and the value.
    """
    converted = math.nan
    if isinstance(value, (float, int, Real)) and not isinstance(value, (bool, Tensor)):
        try:
            converted = value if type(value) is float else float(value)
        except OverflowError:  # of an integer that no float is near to
            converted = math.inf
    if not -math.inf < converted < math.inf:
        raise ValueError(f"{name}={_shown(value)}: a finite number is needed{hint}")
    return converted


def check_choice(name: str, value: object, known: Sequence[str]) -> str:
    """`value`, which is one of some words.

    Raises:
        ValueError: with the name, the value and the words.
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={_shown(value)}; known: {', '.join(known)}")
    return value


def check_tensor(name: str, value: object) -> None:
    """Refuses what is no dense tensor.

    Raises:
        ValueError: with the name and its type.
    """
    if not isinstance(value, Tensor):
        hint = "; torch.as_tensor makes one of it" if hasattr(value, "__array__") else ""
        raise ValueError(f"{name} is a {type(value).__name__}; a tensor is needed{hint}")
    if value.layout is not torch.strided:
        raise ValueError(f"{name} has layout {value.layout}; a dense (strided) tensor is needed")
    if value.is_nested:
        raise ValueError(
            f"{name} is a nested tensor; give its values packed, [1, tokens, ...], and documents= in the mask"
        )


def window_of(window: object) -> Window | None:
    """(left, right) of an attention mask; None where both sides are unbounded.

    Raises:
        ValueError: something else than two sides, each None or an integer of at least 0.
    """
    if window is None:
        return None
    sides = _listed(window)
    found = [None if side is None else _index(side) for side in sides or ()]
    wrong = any(side is not None and (n is None or n < 0) for side, n in zip(sides or (), found, strict=True))
    if len(found) != 2 or wrong:
        raise ValueError(
            f"window {_shown(window)}: give (left, right), such as (4095, 0), each None or at least 0, an integer; "
            f"None is no bound"
        )
    return None if found == [None, None] else (found[0], found[1])


def documents_of(documents: object, length: int | None = None) -> Boundaries | tuple[Boundaries, ...] | None:
    """Returns document boundaries (0, end of the first, ..., N): those of all rows of a batch, or of each.

    Raises:
        ValueError: boundaries that are no integers, do not rise from 0 (to `length`), or are of some rows only.
    """
    if documents is None:
        return None
    values = _listed(documents)
    if not values or set(map(type, values)) == {int}:
        return boundaries_of(documents if values is None else values, length)
    rows = [_listed(row) for row in values]
    if any(row is None for row in rows):  # boundaries of all rows, or a mixture, which is refused as it is
        return boundaries_of(values, length)
    return tuple(boundaries_of(row, length) for row in rows)


def boundaries_of(ends: object, length: int | None = None) -> Boundaries:
    """The boundaries of one row."""
    values = ends if isinstance(ends, (tuple, list)) else ()
    found = [end if type(end) is int else _index(end) for end in cast("Sequence[object]", values)]
    whole = [end for end in found if end is not None]
    wrong = len(found) < 2 or len(whole) < len(found) or whole[0] != 0 or any(a >= b for a, b in pairwise(whole))
    if wrong or length not in (None, whole[-1]):
        wanted = "start at 0 and rise" if length is None else f"rise from 0 to the length {length}"
        raise ValueError(
            f"document boundaries {_shown(ends)} must {wanted}: integers 0, end of the first, ..., N, or one list a row"
        )
    return tuple(whole)


def _index(value: object) -> int | None:
    """The integer that it is; None if it is something else."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool or getattr(value, "ndim", 0):
        return None
    try:
        return index(cast(Any, value))
    except TypeError:
        return None


def _listed(values: object) -> Sequence[object] | None:
    """What is in a sequence, an array or a tensor; None if it is none of these."""
    if isinstance(values, (tuple, list)):
        return cast("Sequence[object]", values)
    tolist = getattr(values, "tolist", None)
    if tolist is not None:
        found = tolist()
        return cast("list[object]", found) if isinstance(found, list) else None
    plain = isinstance(values, Iterable) and not isinstance(values, (str, bytes, dict))
    return list(cast("Iterable[object]", values)) if plain else None


def _shown(value: object) -> str:
    """A value for a message, in one line."""
    text = f"tensor {value.tolist()}" if isinstance(value, Tensor) and value.numel() <= 8 else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 96 else f"{text[:93]}..."
