"""Counting the bytes of live tensors by category, of real ones on the CPU and of fake ones."""

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

from armillary.core.observe.label import Label, current_label
from armillary.plan.memory.simulation.accounts import Account, Allocation
from armillary.plan.memory.simulation.eager_semantics import Undisturbed
from armillary.plan.memory.simulation.torch_private import key_of, local, name_of, resizes_reported, shapes_unseen

CUDA_BLOCK = 512
"""torch's CUDA allocator rounds up to multiples of this many bytes."""

OTHER = "other"

FSDP_TENSORS: dict[str, str] = {
    "fsdp::all_gather_copy_in": "parameters",
    "fsdp::split_with_sizes_copy": "parameters",
    "fsdp::chunk_cat_mixed_dtype": "gradients",
    "c10d::_reduce_scatter_base_": "gradients",
}
"""Category of the tensors that FSDP2 passes to these ops: it allocates them by the same ops as any code."""


class LiveBytes(TorchDispatchMode):
    """While it is open, counts the bytes of tensors from when they come into being until they are gone.

        with LiveBytes() as live:
            model(x).sum().backward()
        live.device.peak, live.device.breakdown()

    A storage counts once, however many views it has. Its category is the label (`armillary.core.observe.label`) under
    which it was allocated, unless it is pinned to another; unlabelled ones that FSDP2 handles are "parameters" or
    "gradients", and the rest "other". What is allocated under a label with `host=True` is in the host's account.

    Tensors from before count only if pinned. What a kernel allocates for itself inside an op is not seen; the ops that
    an op of armillary is made of are.

    Args:
        block: sizes are rounded up to multiples of this many bytes; 1 does not round.
    """

    def __init__(self, block: int = CUDA_BLOCK) -> None:
        super().__init__()
        self.device, self.host = Account(), Account()
        self.ops = 0
        """Ops counted so far."""
        self._block = block
        self._held: dict[int, tuple[Allocation, ref[UntypedStorage]]] = {}
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        self._opened.enter_context(resizes_reported(self._resized))
        self._opened.enter_context(shapes_unseen())
        super().__enter__()
        self._opened.push(super().__exit__)
        self._opened.enter_context(Undisturbed())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def pin(self, category: str, tensors: Iterable[Tensor], host: bool = False) -> None:
        """Books tensors under `category`, in the device's account or the host's; those from before too."""
        account = self.host if host else self.device
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            allocation, _ = self._held.get(key_of(storage), (None, None))
            if allocation is None:
                self._take(storage, account, category)
                continue
            allocation.account.book(allocation, category)
            if allocation.account is not account:
                allocation.account.hand_over(allocation, account)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor will come back with the ops on its local tensors
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # asks a fake tensor for its device
            return result
        self.ops += 1
        for tensor in tensors_in(result):
            self._see(tensor.untyped_storage(), (args, kwargs or {}))
        if func.namespace in ("fsdp", "c10d") and (category := FSDP_TENSORS.get(name_of(func))):
            self._recognise(category, (args, kwargs or {}))
        return result

    def _see(self, storage: UntypedStorage, arguments: Any) -> None:
        if key_of(storage) in self._held:
            self._resized(storage)
        elif all(key_of(storage) != key_of(x.untyped_storage()) for x in tensors_in(arguments)):
            name, host = current_label() or (OTHER, False)
            self._take(storage, self.host if host else self.device, name)

    def _take(self, storage: UntypedStorage, account: Account, category: str) -> None:
        allocation = account.take(self._rounded(storage.nbytes()), category, said(current_label()))
        self._held[key_of(storage)] = allocation, ref(storage, partial(self._died, key_of(storage)))

    def _died(self, key: int, _: ref[UntypedStorage]) -> None:
        allocation, _ = self._held.pop(key)
        allocation.account.resize(allocation, 0)

    def _resized(self, storage: UntypedStorage) -> None:
        """FSDP2 frees a gathered parameter so, and fills it again: nobody else leaves a storage without memory."""
        allocation, _ = self._held.get(key_of(storage), (None, None))
        size = self._rounded(storage.nbytes())
        if allocation is None or allocation.bytes == size:
            return
        if allocation.category == OTHER and 0 in (size, allocation.bytes):
            allocation.account.book(allocation, "parameters")
        allocation.account.resize(allocation, size, said(current_label()))

    def _recognise(self, category: str, arguments: Iterable[Any]) -> None:
        for tensor in tensors_in(arguments):
            allocation, _ = self._held.get(key_of(tensor.untyped_storage()), (None, None))
            if allocation is not None and allocation.category == OTHER:
                allocation.account.book(allocation, category)

    def _rounded(self, size: int) -> int:
        return -(-size // self._block) * self._block


def tensors_in(x: Any) -> Iterator[Tensor]:
    """The tensors in an op's result or arguments."""
    if isinstance(x, Tensor):
        if x.device.type != "meta":
            yield x
    elif isinstance(x, (tuple, list, dict)):
        for part in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(part)


def said(label: Label | None) -> str | None:
    """The label's name, if there is one."""
    return None if label is None else label.name
