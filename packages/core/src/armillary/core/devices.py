"""Copies from host memory to a device that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on a device. For a GPU the copy is queued on the current stream and the host continues."""
    # Only copies from pinned memory are asynchronous.
    pinned = device.type == "cuda" and x.device.type == "cpu"
    return (x.pin_memory() if pinned else x).to(device, non_blocking=True)
