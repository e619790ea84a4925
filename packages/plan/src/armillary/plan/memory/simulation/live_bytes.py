"""`LiveBytes`: a dispatch mode that counts the bytes of live tensors by category, for real CPU tensors or fake ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self
from weakref import ref

from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.core.parts import current_label
from armillary.plan.memory.simulation import torch_private
from armillary.plan.memory.simulation.accounts import Account, Allocation
from armillary.plan.memory.simulation.eager_semantics import EagerSemantics
from armillary.plan.memory.simulation.torch_private import storage_key

CUDA_BLOCK = 512
"""torch's CUDA allocator rounds sizes up to multiples of this many bytes."""

OTHER = "other"
"""Category of tensors that are allocated without a label."""

FSDP_TENSORS: dict[str, str] = {
    "fsdp::all_gather_copy_in": "parameters",
    "fsdp::split_with_sizes_copy": "parameters",
    "fsdp::chunk_cat_mixed_dtype": "gradients",
    "c10d::_reduce_scatter_base_": "gradients",
}
"""Category of the arguments of FSDP2's ops. They are allocated by ordinary ops, which do not show their category."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors from allocation to deallocation, while the context is open.

        with LiveBytes() as live:
            model(x).sum().backward()
        live.device.peak, live.device.breakdown()

    A storage counts once, however many views it has. Its category is the label (`armillary.core.observe.label`) under
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
    """Returns the name of the current label, if there is one."""
    label = current_label()
    return None if label is None else label.name
