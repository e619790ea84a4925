"""Peak FLOP/s of accelerators and peak memory of a process."""

from __future__ import annotations

import resource
import sys

import torch

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L20": 119.5e12}
"""Peak of dense bfloat16 FLOP/s, the denominator of MFU, by a word in the device's name; H100 as SXM."""


def peak_flops(device: torch.device) -> float | None:
    """Returns the device's peak in bfloat16 FLOP/s; None if it is unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for name_part, peak in PEAK_FLOPS.items() if name_part in name), None)


def peak_memory(device: torch.device) -> int:
    """Returns this rank's peak in bytes: allocated GPU memory on cuda, resident memory of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss is in bytes on macOS, in KiB on Linux.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
