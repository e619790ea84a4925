"""Restores what torch does differently while a dispatch mode is active."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Self

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.plan.memory.simulation.torch_private import Uses, called_by_autograd, made_of_ops, modes_disabled, uses

ADD: OpOverload = torch.ops.aten.add.Tensor
ADD_INTO: OpOverload = torch.ops.aten.add_.Tensor


class Undisturbed(TorchDispatchMode):
    """To be entered on top of a mode that counts what ops allocate, on fake tensors or real ones.

    - An op that is made of others runs as these. One of armillary's would be watched as a whole, and its fake
      implementation allocates results only; torch's own are taken apart above autograd, but not below it.
    - Gradients are added up in place where autograd would do so: under any dispatch mode it makes a third tensor.
    """

    def __enter__(self) -> Self:
        unshared_uses()  # while autograd is not at work
        return super().__enter__()

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor will come back with the ops on its local tensors
        if function := made_of_ops(func):
            with self:
                return function(*args, **(kwargs or {}))
        if func is ADD and called_by_autograd():
            for i, held in enumerate(uses(args[:2])):
                if held == unshared_uses() and args[i].nbytes == args[i].untyped_storage().nbytes():
                    return ADD_INTO(args[i], args[1 - i])
        return func(*args, **(kwargs or {}))


@cache
def unshared_uses() -> Uses:
    """The uses of a gradient that autograd alone holds when it is about to be added to: found by looking at one."""
    with modes_disabled(), torch.enable_grad(), Look() as look:
        x = torch.ones(1, requires_grad=True)
        (x.exp() * x.sin()).backward()
    return look.found[0]


class Look(TorchDispatchMode):
    """Notes the uses of what is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Uses] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ADD:
            self.found = uses(args[:2])
        return func(*args, **(kwargs or {}))
