"""A registry of objects by number, because an op takes only tensors, numbers and strings.

Methods and projection modules are registered at construction, calls before they run. The registry has weak references:
a number is valid while its object is alive, and is never reused.
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
    """Returns a new number under which `object_of` finds the object."""
    number = next(_ids)
    _objects[number] = value
    return number


def object_of(number: int) -> Any:
    """Returns a registered object. Raises KeyError if it no longer exists, as the registry keeps none alive."""
    return _objects[number]


def register_as_tensor(value: object) -> Tensor:
    """Registers an object and returns its number as a tensor.

    torch.compile specializes graphs on integers but not on tensor values, so equal modules can share a graph.
    """
    return torch.tensor(register(value), device="cpu")
