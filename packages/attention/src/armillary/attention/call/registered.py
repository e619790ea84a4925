"""Objects by number, because an op takes tensors, numbers and text only.

Methods and projecting modules are registered when they are made, calls when they are about to run. The table holds weak
references: a number is valid as long as somebody else holds its object, and is never given out again.
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
    """Returns a new number under which `registered` finds the object."""
    number = next(_ids)
    _objects[number] = value
    return number


def registered(number: int) -> Any:
    """Returns the object with that number."""
    return _objects[number]


def register_as_tensor(value: object) -> Tensor:
    """Returns the object's number as a tensor.

    A graph is compiled for the very numbers that a module holds, but for any values of tensors: so that modules which
    are alike can share a graph.
    """
    return torch.tensor(register(value), device="cpu")
