"""`EagerSemantics`: a dispatch mode that undoes the changes that dispatch modes make to torch's execution."""

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
    """Restores eager execution for `LiveBytes`, the mode below it, in two ways.

    - Composite ops run as the ops that they consist of. Otherwise an op of Armillary would run its fake implementation,
      which allocates only the results. torch decomposes its own composite ops above autograd, but not below it.
    - In eager mode, autograd adds two gradients in place if it alone owns one of them. Under a dispatch mode it
      allocates the sum, so this mode adds in place instead.
    """

    def __enter__(self) -> Self:
        unshared_gradient()  # cached here, because it cannot be measured inside of a backward pass
        return super().__enter__()

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor dispatches again with its local tensors
        # Autograd queries devices more often than it calls ops. Answering here saves the dispatch to the modes below.
        if func is DEVICE:
            return torch_private.device(args[0])
        if function := torch_private.decomposition(func):
            with self:
                return function(*args, **(kwargs or {}))
        if func is ADD and torch_private.called_by_autograd():
            for i, counts in enumerate(torch_private.reference_counts(args[:2])):
                # Other tensors may read a larger storage, so autograd owns only a tensor that has the whole storage.
                if counts == unshared_gradient() and args[i].nbytes == args[i].untyped_storage().nbytes():
                    return ADD_INTO(args[i], args[1 - i])
        return func(*args, **(kwargs or {}))


@cache
def unshared_gradient() -> torch_private.RefCounts:
    """Reference counts of a gradient that only autograd refers to when it adds another; measured on a small graph."""
    with torch_private.modes_disabled(), torch.enable_grad(), AdditionObserver() as observer:
        x = torch.ones(1, requires_grad=True)
        (x.exp() * x.sin()).backward()
    return observer.counts[0]


class AdditionObserver(TorchDispatchMode):
    """Dispatch mode that records the reference counts of the operands of an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[torch_private.RefCounts] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ADD:
            self.counts = torch_private.reference_counts(args[:2])
        return func(*args, **(kwargs or {}))
