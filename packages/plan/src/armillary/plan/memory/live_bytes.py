"""Counts the bytes of live tensors by category, for real CPU tensors or fake ones.

`LiveBytes` is the dispatch mode that counts. `Account` adds the bytes of one memory, now and at the peak;
`EagerSemantics` undoes the changes that dispatch modes make to torch's execution; `measured_peak` validates all of this
with torch's allocator.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from types import TracebackType
from typing import Any, Self, cast
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.core.internal import current_label
from armillary.plan.memory import torch_private
from armillary.plan.memory.torch_private import storage_key


@dataclass(eq=False)
class Allocation:
    """A live allocation. `resize_time` is the time of its last change of size, on the clock of its account."""

    account: Account
    bytes: int
    category: str
    resize_time: int = 0


@dataclass(eq=False)
class Account:
    """The allocations of one memory (the device's or the host's), in bytes by category.

    The category of an allocation may become known after the peak. For example, a gradient is known as one when it
    appears in a parameter's `.grad`. `relabel` then also corrects the bytes at the peak.

    Args:
        current: live bytes by category.
        total: live bytes.
        peak: maximum of `total` so far.
        at_peak: bytes by category at the peak.
        label_at_peak: label of the computation at the peak.
    """

    current: Counter[str] = field(default_factory=Counter[str])
    total: int = 0
    peak: int = 0
    at_peak: Counter[str] = field(default_factory=Counter[str])
    label_at_peak: str | None = None

    # A clock that counts resizes, and its time at the peak.
    _time: int = 0
    _peak_time: int = 0

    def allocate(self, bytes: int, category: str, label: str | None = None) -> Allocation:
        """Adds and returns an allocation, made during the computation `label`."""
        allocation = Allocation(self, 0, category)
        self.resize(allocation, bytes, label)
        return allocation

    def resize(self, allocation: Allocation, bytes: int, label: str | None = None) -> None:
        """Changes an allocation's size; 0 frees it."""
        self._time += 1
        self.current[allocation.category] += bytes - allocation.bytes
        self.total += bytes - allocation.bytes
        allocation.bytes, allocation.resize_time = bytes, self._time
        if self.total > self.peak:
            self.peak, self.at_peak, self.label_at_peak = self.total, self.current.copy(), label
            self._peak_time = self._time

    def relabel(self, allocation: Allocation, category: str) -> None:
        """Moves an allocation to another category, also in the bytes at the peak if it was live then."""
        # If the allocation has not changed its size since the peak, its bytes are part of the peak.
        live_at_peak = allocation.resize_time <= self._peak_time
        for counter in (self.current, self.at_peak) if live_at_peak else (self.current,):
            counter[allocation.category] -= allocation.bytes
            counter[category] += allocation.bytes
        allocation.category = category

    def transfer(self, allocation: Allocation, account: Account) -> None:
        size = allocation.bytes
        self.resize(allocation, 0)
        allocation.account = account
        account.resize(allocation, size)

    def breakdown(self) -> dict[str, int]:
        """Bytes at the peak by category, largest first."""
        return {category: bytes for category, bytes in self.at_peak.most_common() if bytes}


ADD: OpOverload = torch.ops.aten.add.Tensor
ADD_INTO: OpOverload = torch.ops.aten.add_.Tensor
DEVICE: OpOverload = torch.ops.prim.device.default


class EagerSemantics(TorchDispatchMode):
    """Restores eager execution for `LiveBytes`, the mode below it: of composite ops, and of autograd's additions."""

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
        # Composite ops run as the ops that they consist of: an op of Armillary would run its fake implementation, which
        # allocates only the results. torch decomposes its own composite ops above autograd, but not below it.
        if function := torch_private.decomposition(func):
            with self:
                return function(*args, **(kwargs or {}))
        # Autograd adds in place if it alone owns a gradient, but allocates the sum under a dispatch mode.
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


# torch's CUDA allocator rounds sizes up to multiples of this many bytes.
CUDA_BLOCK = 512

# Category of tensors that are allocated without a label.
OTHER = "other"

# Category of the arguments of FSDP2's ops. They are allocated by ordinary ops, which do not show their category.
FSDP_TENSORS: dict[str, str] = {
    "fsdp::all_gather_copy_in": "parameters",
    "fsdp::split_with_sizes_copy": "parameters",
    "fsdp::chunk_cat": "gradients",
    "fsdp::chunk_cat_mixed_dtype": "gradients",
    "c10d::_reduce_scatter_base_": "gradients",
}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors from allocation to deallocation, while the context is open.

        with LiveBytes() as live:
            model(x).sum().backward()
        live.device.peak, live.device.breakdown()

    A storage counts once, however many views it has. Its category is the label (`armillary.core.trace`) under
    which it was allocated, unless `pin` sets another. Storages without a label that FSDP2 handles are "parameters" or
    "gradients"; all others without a label are "other". Allocations under a label with `host=True` are booked as host
    memory.

    Tensors from before the context count only if they are pinned. Memory that a kernel allocates inside of an op is not
    seen. Armillary's ops run as the ops that they consist of, which are counted.

    Args:
        round_to: sizes are rounded up to multiples of this many bytes; 1 does not round.
    """

    def __init__(self, round_to: int = CUDA_BLOCK) -> None:
        super().__init__()
        self.device, self.host = Account(), Account()
        self.ops = 0
        """Number of ops so far."""
        self._round_to = round_to
        # Live storages by `storage_key`. The weak reference is kept, because its callback frees the allocation.
        self._storages: dict[int, tuple[Allocation, ref[UntypedStorage]]] = {}
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        self._contexts.enter_context(torch_private.observe_resizes(self._resize))
        self._contexts.enter_context(torch_private.hide_shape_propagation())
        super().__enter__()
        # EagerSemantics goes on top of this mode: it decomposes ops before they are counted.
        self._contexts.push(super().__exit__)
        self._contexts.enter_context(EagerSemantics())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contexts.__exit__(kind, error, trace)

    def pin(self, category: str, tensors: Iterable[Tensor], host: bool = False) -> None:
        """Books tensors under `category`, on the device or the host, even if they were allocated before the context."""
        account = self.host if host else self.device
        for tensor in tensors:
            storage = torch_private.local_tensor(tensor).untyped_storage()
            allocation = self._allocation(storage)
            if allocation is None:
                self._allocate(storage, account, category)
                continue
            allocation.account.relabel(allocation, category)
            if allocation.account is not account:
                allocation.account.transfer(allocation, account)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor dispatches again with its local tensors
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a query of a fake tensor's device, which allocates nothing
            return result
        self.ops += 1
        arguments = args, kwargs or {}
        # Every new storage among the results is an allocation; views share the storage of an argument.
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage_key(storage) in self._storages:
                self._resize(storage)
            # A storage of an argument that is not counted is from before the context. It stays uncounted.
            elif all(storage_key(storage) != storage_key(x.untyped_storage()) for x in tensors_in(arguments)):
                category, host = current_label() or (OTHER, False)
                self._allocate(storage, self.host if host else self.device, category)
        # FSDP2's ops show the category of their arguments, which were allocated without a label.
        if func.namespace in ("fsdp", "c10d") and (category := FSDP_TENSORS.get(torch_private.op_name(func))):
            for tensor in tensors_in(arguments):
                allocation = self._allocation(tensor.untyped_storage())
                if allocation is not None and allocation.category == OTHER:
                    allocation.account.relabel(allocation, category)
        return result

    def _allocation(self, storage: UntypedStorage) -> Allocation | None:
        allocation, _ = self._storages.get(storage_key(storage), (None, None))
        return allocation

    def _allocate(self, storage: UntypedStorage, account: Account, category: str) -> None:
        allocation = account.allocate(self._round_up(storage.nbytes()), category, label_name())
        # The callback of the weak reference runs when the last tensor of the storage is gone.
        freed = partial(self._free, storage_key(storage))
        self._storages[storage_key(storage)] = allocation, ref(storage, freed)

    def _free(self, key: int, _: ref[UntypedStorage]) -> None:
        allocation, _ = self._storages.pop(key)
        allocation.account.resize(allocation, 0)

    def _resize(self, storage: UntypedStorage) -> None:
        allocation = self._allocation(storage)
        size = self._round_up(storage.nbytes())
        if allocation is None or allocation.bytes == size:
            return
        # FSDP2 frees and refills gathered parameters by resizing their storage to 0 and back; nothing else does.
        if allocation.category == OTHER and 0 in (size, allocation.bytes):
            allocation.account.relabel(allocation, "parameters")
        allocation.account.resize(allocation, size, label_name())

    def _round_up(self, size: int) -> int:
        return -(-size // self._round_to) * self._round_to


def tensors_in(x: Any) -> Iterator[Tensor]:
    """Yields the tensors in an op's result or arguments, except those on the meta device, which have no memory."""
    if isinstance(x, Tensor):
        if torch_private.device(x).type != "meta":
            yield x
    elif isinstance(x, (tuple, list, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(item)


def label_name() -> str | None:
    label = current_label()
    return None if label is None else label.name


def measured_peak(work: Callable[[], object]) -> int:
    """Runs `work` and returns the peak of the bytes that it allocates on the CPU.

    Reads the allocator events of torch's profiler. So memory that kernels allocate inside of an op counts too, and no
    dispatch mode changes how torch executes.
    """
    gc.collect()  # garbage from before that is freed during `work` would count as negative bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = cast(Any, profiler).profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])
    return max(accumulate((size for _, size in changes), initial=0))
