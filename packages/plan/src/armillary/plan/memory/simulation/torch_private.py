"""Private functions of torch that memory accounting depends on, in one place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import _python_dispatch as dispatch

from armillary.core import compat

C: Any = cast(Any, torch)._C
ENGINE: Any = cast(Any, torch.autograd.graph)._engine_run_backward
WRAPPERS = tuple(import_module(name).__file__ for name in ("torch._compile", "torch._dynamo.eval_frame"))
"""Files of the functions that torch wraps around a dispatch mode's."""

RefCounts = tuple[int, int, int]
"""Reference counts of a tensor, its storage and its Python object."""


def storage_key(storage: UntypedStorage) -> int:
    """Identity of a storage, equal for all Python objects of it while it lives."""
    return cast(Any, storage)._cdata


def local_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, or the local tensor of a DTensor."""
    return cast(Any, tensor)._local_tensor if isinstance(tensor, DTensor) else tensor


def device(tensor: Tensor) -> torch.device:
    """The tensor's device; that of a fake tensor without the dispatch that reading `tensor.device` would cause."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def fake_group(rank: int, ranks: int) -> dist.ProcessGroup:
    """A process group of its own that communicates nothing."""
    return C._distributed_c10d.FakeProcessGroup._create_internal(rank, ranks)


def op_name(op: OpOverload) -> str:
    """Name without overload, such as "aten::add"."""
    return cast(Any, op)._schema.name


@cache
def decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """Python function of an Armillary op, or decomposition of an aten op without a CPU kernel of its own."""
    if op.namespace == "armillary":
        return compat.function_of(op)

    def has_kernel(key: str) -> bool:
        return C._dispatch_has_kernel_for_dispatch_key(op.name(), key)

    composite = op.namespace == "aten" and has_kernel("CompositeImplicitAutograd") and not has_kernel("CPU")
    return op.decompose if composite else None


def reference_counts(tensors: Sequence[Tensor]) -> list[RefCounts]:
    """Current reference counts of each tensor."""
    return [
        (cast(Any, x)._use_count(), C._storage_Use_Count(storage_key(x.untyped_storage())), sys.getrefcount(x))
        for x in tensors
    ]


def called_by_autograd() -> bool:
    """True in a dispatch mode's handler that autograd's engine called directly, rather than Python code."""
    if C._current_graph_task_id() < 0:
        return False
    # Frame 1 is the mode's handler; above it are wrappers of torch, and then the engine if it called the op itself.
    caller = cast(Any, sys)._getframe(2)
    while caller.f_back and caller.f_code.co_filename in WRAPPERS:
        caller = caller.f_back
    return caller.f_code is ENGINE.__code__


def modes_disabled() -> AbstractContextManager[Any]:
    """Context manager that hides all ops from dispatch modes."""
    return cast(Any, dispatch)._disable_current_modes()


def observe_resizes(callback: Callable[[UntypedStorage], None]) -> AbstractContextManager[None]:
    """Calls `callback` after each `untyped_storage().resize_()`, which is no op and so invisible to dispatch modes."""

    def wrap(resize: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(self: UntypedStorage, *args: Any) -> Any:
            result = resize(self, *args)
            callback(self)
            return result

        return resize_

    return patch_method(UntypedStorage, "resize_", wrap)


def hide_shape_propagation() -> AbstractContextManager[None]:
    """Hides DTensor's shape propagation: it runs each new op on fake tensors of the global shape."""

    def wrap(propagate: Callable[..., Any]) -> Callable[..., Any]:
        def propagate_unseen(self: ShardingPropagator, *args: Any) -> Any:
            with modes_disabled():
                return propagate(self, *args)

        return propagate_unseen

    return patch_method(ShardingPropagator, "_propagate_tensor_meta_non_cached", wrap)


@contextmanager
def patch_method(owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Generator[None]:
    """Replaces the method `owner.name` by `wrap(method)` inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
