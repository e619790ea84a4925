"""Keeping in the host's memory what a layer's backward needs, while other layers are at work.

On CUDA, tensors go to pinned memory and come back on a stream of their own; on the CPU they are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from armillary.core import label


class Kept:
    """Copies of tensors in the host's memory.

    Args:
        tensors: to be copied; their memory is free to be used again when they are dropped, not to be written to.
        below: what the layer before keeps, and backward needs next.
    """

    def __init__(self, tensors: Sequence[Tensor], below: Kept | None) -> None:
        self.device = tensors[0].device
        self.below = below
        self.host = [to_host(x) for x in tensors]
        self.coming: list[Tensor] = []

    def fetch(self) -> None:
        """Starts bringing the tensors back, if nobody has."""
        self.coming = self.coming or [to_device(x, self.device) for x in self.host]

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


def to_host(x: Tensor) -> Tensor:
    """A copy in the host's memory, pinned where a device copies to it."""
    with label("checkpoints", host=True):
        if x.device.type != "cuda":
            return x.detach().clone()
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    stream = side_stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        host.copy_(x.detach(), non_blocking=True)
    x.record_stream(stream)
    return host


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, begun. It is allocated by the current stream, which must wait for it."""
    with label("checkpoints"):
        if device.type != "cuda":
            return x.clone()
        back = torch.empty(x.shape, dtype=x.dtype, device=device)
    stream = side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # whoever had this memory before is done with it
    with torch.cuda.stream(stream):
        back.copy_(x, non_blocking=True)
    return back


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that copies run on, beside what is computed."""
    return torch.cuda.Stream(device)
