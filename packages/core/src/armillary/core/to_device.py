"""From the host's memory to a device's without waiting for what the device computes."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A GPU copies from pinned memory when it comes to it; the host goes on meanwhile."""
    moved = device.type == "cuda" and x.device.type == "cpu"
    return (x.pin_memory() if moved else x).to(device, non_blocking=True)
