"""Keeping in the host's memory what a layer's backward needs, while other layers are at work.

On CUDA, tensors go to pinned memory and come back on a stream of their own; on the CPU they are copied.

The allocator gives the memory of a tensor that is dropped to what the stream that it was made on computes next. By
`record_stream` it would first see whether a copy on another stream is done; but the host is ahead of the GPU, sees that
it is not, and allocates anew, layer after layer. So whatever a copy reads or writes is held until the stream that
computes has been told to wait for the copy, and dropped then: its memory is used again at once, and in order.
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
    """The stream of a GPU that copies run on, beside what is computed."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.leaving: Callable[[], Transfer | None] = lambda: None
        """The latest copies to the host."""

    def start(self, copy: Callable[[], None]) -> Callable[[], None]:
        """Runs `copy` after all that the current stream has been given. What is returned has that stream wait for it,
        and the stream that is then the current one; the host never waits."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            copy()
        return partial(self._wait, current, self.stream.record_event())

    def _wait(self, started_from: torch.cuda.Stream, done: torch.Event | torch.cuda.Event) -> None:
        for stream in {started_from, torch.cuda.current_stream(self.device)}:
            stream.wait_event(done)


class SimulatedStream:
    """Instead of a GPU's: copies are made at once, and what they read is held for as long as there."""

    def __init__(self) -> None:
        self.leaving: Callable[[], Transfer | None] = lambda: None

    def start(self, copy: Callable[[], None]) -> Callable[[], None]:
        copy()
        return lambda: None


_simulated: ContextVar[SimulatedStream | None] = ContextVar("simulated stream", default=None)


@contextmanager
def simulated_stream() -> Generator[None]:
    """Meanwhile, on this thread, tensors of the CPU are held for as long as a GPU's are: for simulations of memory."""
    token = _simulated.set(SimulatedStream())
    try:
        yield
    finally:
        _simulated.reset(token)


def side_stream(device: torch.device) -> SideStream | SimulatedStream | None:
    """That of a GPU; None where copies are done at once."""
    return stream_of_gpu(device) if device.type == "cuda" else _simulated.get()


@cache
def stream_of_gpu(device: torch.device) -> SideStream:
    """One for each."""
    return SideStream(device)


def settle(device: torch.device) -> None:
    """Has the current stream wait for the latest copies to the host, if it has not, and holds what they read no longer.

    To be called when a block is done, for those of the block before."""
    side = side_stream(device)
    if side is not None and (before := side.leaving()) is not None:
        before.finish()


class Transfer:
    """Copies between host and device, begun; holds the device's tensors until `finish`, or until it is dropped."""

    def __init__(self, tensors: Sequence[Tensor], copy: Callable[[], None]) -> None:
        self.tensors, self._wait = tensors, None
        side = side_stream(tensors[0].device)
        if side is None:
            copy()
        else:
            self._wait = side.start(copy)

    def finish(self) -> Sequence[Tensor]:
        """The tensors, which the current stream may use and drop now."""
        if self._wait is not None:
            self._wait()
        tensors, self.tensors, self._wait = self.tensors, (), None
        return tensors

    def __del__(self) -> None:
        self.finish()


class HostCopy:
    """Room for a tensor in the host's memory, in parts."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.size = PINNED // x.element_size()
        with label("checkpoints", host=True):
            sizes = [part.numel() for part in x.detach().reshape(-1).split(self.size)]
            pinned = x.device.type == "cuda"
            self.parts = [torch.empty(n, dtype=x.dtype, device="cpu", pin_memory=pinned) for n in sizes]

    def write(self, x: Tensor) -> None:
        """Begins to copy the tensor to here."""
        for part, source in zip(self.parts, x.detach().reshape(-1).split(self.size), strict=True):
            part.copy_(source, non_blocking=True)

    def read(self, x: Tensor) -> None:
        """Begins to copy what is here to a tensor."""
        for part, target in zip(self.parts, x.view(-1).split(self.size), strict=True):
            target.copy_(part, non_blocking=True)

    def like(self) -> Tensor:
        """Room for it on its device."""
        with label("checkpoints"):
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class OffloadedTensors:
    """Copies of tensors in the host's memory.

    On CUDA the tensors themselves are held until the next layer is done (`settle`), or these are asked for, or dropped;
    so in forward one layer's are still there beside those of the layer at work.

    Args:
        tensors: to be copied, of one device. Must not be written to while this lives.
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
        """Has the current stream wait until the copies are made, and holds the tensors themselves no longer."""
        self.leaving.finish()

    def fetch(self) -> None:
        """Starts bringing the tensors back, if nobody has, and if they are not here still."""
        if self.coming is None and not self.leaving.tensors:
            tensors = [copy.like() for copy in self.host]
            self.coming = Transfer(tensors, partial(each, HostCopy.read, self.host, tensors))

    def take(self) -> Sequence[Tensor]:
        """The tensors on their device, ready for the current stream. The copies stay."""
        self.fetch()
        found, self.coming = self.coming or self.leaving, None
        return found.finish()


def each(copy: Callable[[HostCopy, Tensor], None], host: Sequence[HostCopy], tensors: Sequence[Tensor]) -> None:
    """Copies all."""
    for there, here in zip(host, tensors, strict=True):
        copy(there, here)
