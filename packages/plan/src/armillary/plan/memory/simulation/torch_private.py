"""What is private in torch and memory accounting stands on, all in one place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import _python_dispatch as dispatch

from armillary.core import compat

C: Any = cast(Any, torch)._C
ENGINE: Any = cast(Any, torch.autograd.graph)._engine_run_backward
WRAPPERS = tuple(import_module(name).__file__ for name in ("torch._compile", "torch._dynamo.eval_frame"))
"""Where the functions are that torch wraps around a dispatch mode's."""

Replacement = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a method of another one."""

Uses = tuple[int, int, int]
"""By how many a tensor is held, its storage, and the tensor's Python object."""


def key_of(storage: UntypedStorage) -> int:
    """The storage's identity: the same for every Python object that stands for it, as long as it lives."""
    return cast(Any, storage)._cdata


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return cast(Any, tensor)._local_tensor if isinstance(tensor, DTensor) else tensor


def name_of(op: OpOverload) -> str:
    """Such as "aten::add"."""
    return cast(Any, op)._schema.name


@cache
def made_of_ops(op: OpOverload) -> Callable[..., Any] | None:
    """The function that an op is, if it is one of armillary's, or one of torch's that merely calls others."""
    if op.namespace == "armillary":
        return compat.function_of(op)
    merely = op.namespace == "aten" and has_kernel(op, "CompositeImplicitAutograd") and not has_kernel(op, "CPU")
    return op.decompose if merely else None


def has_kernel(op: OpOverload, key: str) -> bool:
    """Whether the op is implemented for a dispatch key."""
    return C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def uses(tensors: Sequence[Tensor]) -> list[Uses]:
    """How many hold each of them now."""
    return [
        (cast(Any, x)._use_count(), C._storage_Use_Count(key_of(x.untyped_storage())), sys.getrefcount(x))
        for x in tensors
    ]


def called_by_autograd() -> bool:
    """Whether the dispatch mode that asks this was called by autograd's engine itself, and not from Python."""
    if C._current_graph_task_id() < 0:
        return False
    caller = cast(Any, sys)._getframe(2)
    while caller.f_back and caller.f_code.co_filename in WRAPPERS:
        caller = caller.f_back
    return caller.f_code is ENGINE.__code__


def modes_disabled() -> AbstractContextManager[Any]:
    """Meanwhile, no dispatch mode sees anything."""
    return cast(Any, dispatch)._disable_current_modes()


def resizes_reported(report: Callable[[UntypedStorage], None]) -> AbstractContextManager[None]:
    """Calls `report` after each `untyped_storage().resize_()`, which is no op that a dispatch mode could see."""

    def reporting(original: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(self: UntypedStorage, *args: Any) -> Any:
            result = original(self, *args)
            report(self)
            return result

        return resize_

    return replaced(UntypedStorage, "resize_", reporting)


def shapes_unseen() -> AbstractContextManager[None]:
    """DTensor tries each new op on fake tensors of the whole shape; these are no memory of anybody's."""

    def unseen(original: Callable[..., Any]) -> Callable[..., Any]:
        def propagate(self: ShardingPropagator, *args: Any) -> Any:
            with modes_disabled():
                return original(self, *args)

        return propagate

    return replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen)


@contextmanager
def replaced(owner: type, name: str, replacement: Replacement) -> Generator[None]:
    """Meanwhile, a class has another method."""
    original = getattr(owner, name)
    setattr(owner, name, replacement(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
