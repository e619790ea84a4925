"""A function that torch.compile does not trace. Imported only while compiling, because the import takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


def _call(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return function(*arguments)


outside_graphs = cast(
    Callable[..., Tensor], torch.compiler.disable(_call, reason="autograd projects stages of heads again in backward")
)
"""Returns the result of a function, called with arguments, with a graph break."""
