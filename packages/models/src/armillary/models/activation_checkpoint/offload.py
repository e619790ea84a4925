"""Keeping in the host's memory what a layer's backward needs, while other layers are at work.

On CUDA, tensors go to pinned memory and come back on a stream of their own; on the CPU they are copied.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from armillary.core import label

PINNED = 2**26
"""Bytes of a part of a copy. torch rounds pinned memory up to powers of two: in one part, a copy might take twice as
much."""


class HostCopy:
    """A copy of a tensor in the host's memory, in parts, under way if the tensor is on a GPU."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        flat, pinned = x.detach().reshape(-1), x.device.type == "cuda"
        with label("checkpoints", host=True):
            size = PINNED // x.element_size()
            sizes = [part.numel() for part in flat.split(size)]
            self.parts = [torch.empty(n, dtype=x.dtype, device="cpu", pin_memory=pinned) for n in sizes]
        with on_side_stream(self.device):
            for part, source in zip(self.parts, flat.split(size), strict=True):
                part.copy_(source, non_blocking=True)
        if pinned:
            flat.record_stream(side_stream(self.device))

    def back(self) -> Tensor:
        """The tensor on its device, begun; the current stream must wait for it."""
        with label("checkpoints"):
            whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        flat = whole.view(-1)
        with on_side_stream(self.device):
            for part, target in zip(self.parts, flat.split(PINNED // flat.element_size()), strict=True):
                target.copy_(part, non_blocking=True)
        if self.device.type == "cuda":
            whole.record_stream(side_stream(self.device))
        return whole


class OffloadedTensors:
    """Copies of tensors in the host's memory.

    Args:
        tensors: to be copied. Their memory may be given back, but not be written to while they live.
        below: what the layer before keeps, and backward needs next.
    """

    def __init__(self, tensors: Sequence[Tensor], below: OffloadedTensors | None) -> None:
        self.device = tensors[0].device
        self.below = below
        self.host = [HostCopy(x) for x in tensors]
        self.coming: list[Tensor] = []

    def fetch(self) -> None:
        """Starts bringing the tensors back, if nobody has."""
        self.coming = self.coming or [copy.back() for copy in self.host]

    def take(self) -> Sequence[Tensor]:
        """The tensors on their device, ready for the current stream. The copies stay."""
        self.fetch()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_stream(side_stream(self.device))
        tensors, self.coming = self.coming, []
        return tensors

    def fetch_below(self) -> None:
        """Starts bringing back what the layer before keeps."""
        if self.below is not None:
            self.below.fetch()

    def release(self) -> None:
        """Drops the copies."""
        self.below = None
        self.host.clear()


@contextmanager
def on_side_stream(device: torch.device) -> Generator[None]:
    """Around copies: on CUDA they run on a stream of their own, after what the current one has been given so far."""
    if device.type != "cuda":
        yield
        return
    stream = side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that copies run on, beside what is computed."""
    return torch.cuda.Stream(device)
