"""A call that torch.compile does not trace. Imported only while compiling, because the import takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from armillary.attention.call.autograd import project_eagerly

project_outside_graphs = cast(
    Callable[..., Tensor],
    torch.compiler.disable(project_eagerly, reason="autograd projects stages of heads again in backward"),
)
"""`project_eagerly` with a graph break."""
