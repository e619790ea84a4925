"""Offloading the tensors for a layer's backward to the host's memory while other layers run.

On CUDA, tensors go to pinned memory and come back on a stream of their own; on the CPU they are copied.

The allocator reuses a freed tensor's memory for the next op on the stream that allocated it. With `record_stream` it
would first check if a copy on another stream is done; but the host runs ahead of the GPU, finds that it is not, and
allocates more memory, layer after layer. Therefore tensors that a copy reads or writes are held until the computing
stream has been told to wait for the copy, and released then: their memory is reused at once, and in order.
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

PINNED = 2**26
"""Bytes of a part of a copy. torch rounds pinned memory up to powers of two: in one part, a copy might take twice as
much."""


class SideStream:
    """A GPU stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.leaving: Callable[[], Transfer | None] = lambda: None
        """The latest copies to the host."""

    def start(self, copy: Callable[[], None]) -> Callable[[], None]:
        """Runs `copy` after all work of the current stream. The returned function makes the then current stream wait
        for it; the host never waits.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            copy()
        return partial(self._wait, current, self.stream.record_event())

    def _wait(self, started_from: torch.cuda.Stream, done: torch.Event | torch.cuda.Event) -> None:
        for stream in {started_from, torch.cuda.current_stream(self.device)}:
            stream.wait_event(done)


class SimulatedStream:
    """A stand-in for a GPU's stream: copies happen at once, and their sources are held as long as on a GPU."""

    def __init__(self) -> None:
        self.leaving: Callable[[], Transfer | None] = lambda: None

    def start(self, copy: Callable[[], None]) -> Callable[[], None]:
        copy()
        return lambda: None


_simulated: ContextVar[SimulatedStream | None] = ContextVar("simulated stream", default=None)


@contextmanager
def simulated_stream() -> Generator[None]:
    """Holds CPU tensors of this thread as long as a GPU's would be: for simulations of memory."""
    token = _simulated.set(SimulatedStream())
    try:
        yield
    finally:
        _simulated.reset(token)


def side_stream(device: torch.device) -> SideStream | SimulatedStream | None:
    """Returns the copy stream of a GPU; None where copies happen at once."""
    return stream_of_gpu(device) if device.type == "cuda" else _simulated.get()


@cache
def stream_of_gpu(device: torch.device) -> SideStream:
    """Returns the copy stream of a GPU, one for each."""
    return SideStream(device)


def settle(device: torch.device) -> None:
    """Makes the current stream wait for the latest copies to the host, and releases their sources.

    To be called when a block is done, for the copies of the block before.
    """
    side = side_stream(device)
    if side is not None and (before := side.leaving()) is not None:
        before.finish()


class Transfer:
    """A copy in flight between host and device; holds the device's tensors until `finish`, or until it is dropped."""

    def __init__(self, tensors: Sequence[Tensor], copy: Callable[[], None]) -> None:
        self.tensors, self._wait = tensors, None
        side = side_stream(tensors[0].device)
        if side is None:
            copy()
        else:
            self._wait = side.start(copy)

    def finish(self) -> Sequence[Tensor]:
        """Returns the tensors, which the current stream may use and free now."""
        if self._wait is not None:
            self._wait()
        tensors, self.tensors, self._wait = self.tensors, (), None
        return tensors

    def __del__(self) -> None:
        self.finish()


class HostCopy:
    """Host memory for a tensor, in parts."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.size = PINNED // x.element_size()
        with label("checkpoints", host=True):
            sizes = [part.numel() for part in x.detach().reshape(-1).split(self.size)]
            pinned = x.device.type == "cuda"
            self.parts = [torch.empty(n, dtype=x.dtype, device="cpu", pin_memory=pinned) for n in sizes]

    def write(self, x: Tensor) -> None:
        """Starts to copy the tensor to the host."""
        for part, source in zip(self.parts, x.detach().reshape(-1).split(self.size), strict=True):
            part.copy_(source, non_blocking=True)

    def read(self, x: Tensor) -> None:
        """Starts to copy the host's values to a tensor."""
        for part, target in zip(self.parts, x.view(-1).split(self.size), strict=True):
            target.copy_(part, non_blocking=True)

    def like(self) -> Tensor:
        """Returns an empty tensor on its device."""
        with label("checkpoints"):
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class OffloadedTensors:
    """Copies of tensors in the host's memory.

    On CUDA the tensors themselves are held until the next layer is done (`settle`), or until they are requested or
    dropped: in forward, one layer's tensors coexist with those of the running layer.

    Args:
        tensors: the tensors to copy, of one device. Must not be written to while this lives.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.host = [HostCopy(x) for x in tensors]
        self.coming: Transfer | None = None
        settle(tensors[0].device)
        self.leaving = Transfer(tensors, partial(each, HostCopy.write, self.host, tensors))
        side = side_stream(tensors[0].device)
        if side is None:
            self.leaving.finish()
        else:
            side.leaving = ref(self.leaving)

    def settle(self) -> None:
        """Makes the current stream wait for the copies, and releases the tensors themselves."""
        self.leaving.finish()

    def fetch(self) -> None:
        """Starts to copy the tensors back, unless that was done or they are still on the device."""
        if self.coming is None and not self.leaving.tensors:
            tensors = [copy.like() for copy in self.host]
            self.coming = Transfer(tensors, partial(each, HostCopy.read, self.host, tensors))

    def take(self) -> Sequence[Tensor]:
        """Returns the tensors on their device, ready for the current stream. The copies stay."""
        self.fetch()
        tensors, self.coming = self.coming or self.leaving, None
        return tensors.finish()


def each(copy: Callable[[HostCopy, Tensor], None], host: Sequence[HostCopy], tensors: Sequence[Tensor]) -> None:
    """Copies all parts."""
    for target, source in zip(host, tensors, strict=True):
        copy(target, source)
