"""`EagerSemantics`: a dispatch mode that undoes the ways in which torch executes differently under dispatch modes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Self

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.plan.memory.simulation import torch_private

ADD: OpOverload = torch.ops.aten.add.Tensor
ADD_INTO: OpOverload = torch.ops.aten.add_.Tensor
DEVICE: OpOverload = torch.ops.prim.device.default


class EagerSemantics(TorchDispatchMode):
    """Restores eager execution for a mode that counts allocations. Enter it on top of that mode.

    - Composite ops run as the ops they are made of. Otherwise an op of Armillary would be counted by its fake
      implementation, which only allocates results; torch decomposes its own above autograd, but not below it.
    - Autograd accumulates gradients in place when it owns one of them; under a dispatch mode it allocates the sum.
    """

    def __enter__(self) -> Self:
        unshared_gradient()  # measured outside of a backward pass, then cached
        return super().__enter__()

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor dispatches again with its local tensors
        # Autograd queries devices more often than it calls ops. An answer here spares the modes below.
        if func is DEVICE:
            return torch_private.device(args[0])
        if function := torch_private.decomposition(func):
            with self:
                return function(*args, **(kwargs or {}))
        if func is ADD and torch_private.called_by_autograd():
            for i, counts in enumerate(torch_private.reference_counts(args[:2])):
                # A view of a larger storage may have other readers: only a tensor with its own storage is owned.
                if counts == unshared_gradient() and args[i].nbytes == args[i].untyped_storage().nbytes():
                    return ADD_INTO(args[i], args[1 - i])
        return func(*args, **(kwargs or {}))


@cache
def unshared_gradient() -> torch_private.RefCounts:
    """Reference counts of a gradient that autograd alone holds, at its accumulation; measured on a small graph."""
    with torch_private.modes_disabled(), torch.enable_grad(), AdditionObserver() as observer:
        x = torch.ones(1, requires_grad=True)
        (x.exp() * x.sin()).backward()
    return observer.counts[0]


class AdditionObserver(TorchDispatchMode):
    """Records the reference counts of the operands of an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[torch_private.RefCounts] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ADD:
            self.counts = torch_private.reference_counts(args[:2])
        return func(*args, **(kwargs or {}))
