"""Offloads the tensors for a layer's backward to host memory, while other layers run.

On CUDA, tensors are copied to pinned memory and back on a side stream; on the CPU they are copied synchronously.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from weakref import ref

import torch
from torch import Tensor

from armillary.core import label

# Largest size of a pinned buffer, in bytes. torch rounds a buffer's size up to a power of two, so one buffer for a
# whole tensor could take almost twice the tensor's bytes.
PINNED = 2**26


class SideStream:
    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        # Returns the latest transfer to the host, by a weak reference; None if there was none, or it was deleted.
        self.latest_copy: Callable[[], Transfer | None] = lambda: None

    def start(self, copy: Callable[[], None]) -> Callable[[], None]:
        """Runs `copy` after all queued work. Returns a function that makes the current stream, not the host, wait."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)  # the kernel that computes the source may still run there
        with torch.cuda.stream(self.stream):
            copy()
        return partial(self._wait, current, self.stream.record_event())

    def _wait(self, started_from: torch.cuda.Stream, copied_event: torch.Event | torch.cuda.Event) -> None:
        # Two streams may reuse the copied memory: the one that was current at the start, and the one that is current
        # now. They differ if backward is called under another current stream than forward.
        for stream in {started_from, torch.cuda.current_stream(self.device)}:
            stream.wait_event(copied_event)


class SimulatedStream:
    """A stand-in for a GPU's side stream: copies are synchronous, but their sources live as long as on a GPU."""

    def __init__(self) -> None:
        self.latest_copy: Callable[[], Transfer | None] = lambda: None

    def start(self, copy: Callable[[], None]) -> Callable[[], None]:
        copy()
        return lambda: None


_simulated: ContextVar[SimulatedStream | None] = ContextVar("simulated stream", default=None)


@contextmanager
def simulated_stream() -> Generator[None]:
    """Context manager that keeps the tensors of a transfer alive as long as on a GPU, to simulate memory on the CPU."""
    token = _simulated.set(SimulatedStream())
    try:
        yield
    finally:
        _simulated.reset(token)


def side_stream(device: torch.device) -> SideStream | SimulatedStream | None:
    """Returns the copy stream of a device; None where copies are synchronous."""
    return _stream_of_gpu(device) if device.type == "cuda" else _simulated.get()


_stream_of_gpu = cache(SideStream)


def finish_latest_copy(device: torch.device) -> None:
    """Makes the current stream wait for the latest transfer to the host, and releases its device tensors."""
    # Called at the end of a block's forward, when the previous block's transfer has overlapped with this block, and
    # before the next transfer to the host.
    side = side_stream(device)
    if side is not None and (transfer := side.latest_copy()) is not None:
        transfer.finish()


class Transfer:
    """A copy in flight between host and device. Refers to the device's tensors until `finish` or its own deletion."""

    def __init__(self, tensors: Sequence[Tensor], copy: Callable[[], None]) -> None:
        # torch's allocator reuses a freed tensor's memory for the next op on the stream that allocated it. With
        # `record_stream` it would reuse the memory only after it has seen that the copy on the side stream is finished.
        # But the host runs ahead of the GPU: at the next allocation the copy is still queued, so the allocator takes
        # new memory, layer after layer. A reference that ends when the compute stream waits for the copy lets the
        # memory be reused at once, in stream order.
        self.tensors, self._wait = tensors, None
        side = side_stream(tensors[0].device)
        if side is None:
            copy()
        else:
            self._wait = side.start(copy)

    def finish(self) -> Sequence[Tensor]:
        """Makes the current stream wait for the copy. Returns the device's tensors, and no longer refers to them."""
        if self._wait is not None:
            self._wait()
        tensors, self.tensors, self._wait = self.tensors, (), None
        return tensors

    def __del__(self) -> None:
        self.finish()


class HostCopy:
    """Host memory for a tensor, in buffers of at most `PINNED` bytes."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.size = PINNED // x.element_size()
        with label("checkpoints", host=True):
            pinned = x.device.type == "cuda"  # copies from and to memory that is not pinned would make the host wait
            sizes = [piece.numel() for piece in x.detach().reshape(-1).split(self.size)]
            self.buffers = [torch.empty(n, dtype=x.dtype, device="cpu", pin_memory=pinned) for n in sizes]

    def write(self, x: Tensor) -> None:
        for buffer, source in zip(self.buffers, x.detach().reshape(-1).split(self.size), strict=True):
            buffer.copy_(source, non_blocking=True)

    def read(self, x: Tensor) -> None:
        for buffer, target in zip(self.buffers, x.view(-1).split(self.size), strict=True):
            target.copy_(buffer, non_blocking=True)

    def empty_on_device(self) -> Tensor:
        with label("checkpoints"):
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class OffloadedTensors:
    """Copies of tensors, which must not be written to meanwhile, in the host's memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # On CUDA this object also refers to the device's tensors until the next layer's forward is done
        # (`finish_latest_copy`), or until `finish_copy`, `take` or its own deletion. So in forward the tensors of two
        # layers are on the device at once.
        self.host = [HostCopy(x) for x in tensors]
        self.copy_to_device: Transfer | None = None
        # Releases the previous layer's tensors before this object refers to its own.
        finish_latest_copy(tensors[0].device)
        self.copy_to_host = Transfer(tensors, partial(copy_all, HostCopy.write, self.host, tensors))
        side = side_stream(tensors[0].device)
        if side is None:
            self.copy_to_host.finish()
        else:
            side.latest_copy = ref(self.copy_to_host)

    def finish_copy(self) -> None:
        """Makes the current stream wait for the copies to the host, and releases the device's tensors."""
        self.copy_to_host.finish()

    def fetch(self) -> None:
        """Starts to copy the tensors back, unless that was started before or they are still on the device."""
        if self.copy_to_device is None and not self.copy_to_host.tensors:
            # Queued kernels may still read the memory that the new tensors reuse; `SideStream.start` waits for them.
            tensors = [copy.empty_on_device() for copy in self.host]
            self.copy_to_device = Transfer(tensors, partial(copy_all, HostCopy.read, self.host, tensors))

    def take(self) -> Sequence[Tensor]:
        """Returns the tensors on their device, ready for the current stream. The copies on the host stay."""
        self.fetch()  # starts the copy now, unless it was prefetched
        # Without a copy to the device, the original tensors are still there: `copy_to_host` refers to them.
        transfer = self.copy_to_device or self.copy_to_host
        self.copy_to_device = None  # a later call, under `retain_graph`, copies from the host again
        return transfer.finish()


def copy_all(copy: Callable[[HostCopy, Tensor], None], host: Sequence[HostCopy], tensors: Sequence[Tensor]) -> None:
    for host_copy, tensor in zip(host, tensors, strict=True):
        copy(host_copy, tensor)
