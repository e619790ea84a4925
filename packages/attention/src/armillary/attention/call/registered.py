"""A registry of objects by number, because an op takes only tensors, numbers and strings.

Methods and projection modules are registered when they are constructed, calls before they run. The registry keeps no
object alive: a number is valid as long as its object exists, and is never reused.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()
_ids = count()


def register(value: object) -> int:
    """Registers an object and returns its number, by which `object_of` finds it."""
    number = next(_ids)
    _objects[number] = value
    return number


def object_of(number: int) -> Any:
    """Returns a registered object. Raises KeyError if it no longer exists."""
    return _objects[number]


def register_as_tensor(value: object) -> Tensor:
    """Registers an object and returns its number as a tensor.

    torch.compile specializes a graph to an integer but not to the value of a tensor, so equal modules share a graph.
    """
    return torch.tensor(register(value), device="cpu")
