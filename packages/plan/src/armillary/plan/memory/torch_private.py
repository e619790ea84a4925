"""All uses of torch's private functions by the memory simulation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import _python_dispatch as dispatch

from armillary.core.internal import compat

C: Any = cast(Any, torch)._C
ENGINE: Any = cast(Any, torch.autograd.graph)._engine_run_backward
# Files of the functions that torch wraps around `__torch_dispatch__`.
WRAPPERS = tuple(str(Path(torch.__file__).parent / name) for name in ("_compile.py", "_dynamo/eval_frame.py"))

# Reference counts of a tensor, its storage and its Python object.
RefCounts = tuple[int, int, int]


def storage_key(storage: UntypedStorage) -> int:
    """Identity of a storage: equal for all Python objects that refer to it, as long as it lives."""
    return cast(Any, storage)._cdata


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns the local tensor of a DTensor, or any other tensor itself."""
    return cast(Any, tensor)._local_tensor if isinstance(tensor, DTensor) else tensor


def device(tensor: Tensor) -> torch.device:
    """Returns the tensor's device. Reads it without a dispatch, which `tensor.device` of a fake tensor would cause."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def fake_group(rank: int, ranks: int) -> dist.ProcessGroup:
    """Returns a new process group that sends nothing, independent of the default group."""
    import_module("torch.distributed._tools.fake_collectives")  # collectives on fake tensors; takes seconds
    return C._distributed_c10d.FakeProcessGroup._create_internal(rank, ranks)


def op_name(op: OpOverload) -> str:
    return cast(Any, op)._schema.name


@cache
def decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """Returns the Python function of an Armillary op, or the decomposition of an aten op that has no CPU kernel."""
    # Armillary's ops are Python functions behind an op, which run other ops.
    if op.namespace == "armillary":
        return compat.function_of(op)

    def has_kernel(key: str) -> bool:
        return C._dispatch_has_kernel_for_dispatch_key(op.name(), key)

    # An op with a CPU kernel runs as one op even if it has a decomposition.
    composite = op.namespace == "aten" and has_kernel("CompositeImplicitAutograd") and not has_kernel("CPU")
    return op.decompose if composite else None


def reference_counts(tensors: Sequence[Tensor]) -> list[RefCounts]:
    """Returns the current reference counts of each tensor."""
    return [
        (cast(Any, x)._use_count(), C._storage_Use_Count(storage_key(x.untyped_storage())), sys.getrefcount(x))
        for x in tensors
    ]


def called_by_autograd() -> bool:
    """True if autograd's engine, and not Python code, called the op that a `__torch_dispatch__` handles.

    Call it in the `__torch_dispatch__` itself: it inspects the stack.
    """
    if C._current_graph_task_id() < 0:
        return False
    # Frame 1 is `__torch_dispatch__`. Its callers are wrappers of torch, then the engine if it called the op.
    caller = cast(Any, sys)._getframe(2)
    while caller.f_back and caller.f_code.co_filename in WRAPPERS:
        caller = caller.f_back
    return caller.f_code is ENGINE.__code__


def modes_disabled() -> AbstractContextManager[Any]:
    """Context manager in which no dispatch mode sees ops."""
    return cast(Any, dispatch)._disable_current_modes()


def observe_resizes(callback: Callable[[UntypedStorage], None]) -> AbstractContextManager[None]:
    """Context manager that calls `callback` after each `resize_` of a storage, which dispatch modes do not see."""

    def wrap(resize: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(self: UntypedStorage, *args: Any) -> Any:
            result = resize(self, *args)
            callback(self)
            return result

        return resize_

    return patch_method(UntypedStorage, "resize_", wrap)


def hide_shape_propagation() -> AbstractContextManager[None]:
    """Context manager that hides DTensor's shape propagation from dispatch modes.

    It runs each new op on fake tensors of the global shape, which must not be counted.
    """

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
