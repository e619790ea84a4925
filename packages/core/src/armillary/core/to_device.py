"""Copies from host to device memory that do not block the host."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on a device. A GPU copies from pinned memory in stream order, while the host continues."""
    pinned = device.type == "cuda" and x.device.type == "cpu"
    return (x.pin_memory() if pinned else x).to(device, non_blocking=True)
