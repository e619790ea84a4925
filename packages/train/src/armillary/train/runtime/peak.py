"""Peaks: what accelerators could compute at most, and what a process has held at most."""

from __future__ import annotations

import resource
import sys

import torch

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L20": 119.5e12}
"""Dense bfloat16 FLOP/s, which an MFU is a share of, by a part of the device's name."""


def peak_flops(device: torch.device) -> float | None:
    """The device's peak in bfloat16 FLOP/s, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this rank: allocated GPU memory on cuda, resident memory of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
