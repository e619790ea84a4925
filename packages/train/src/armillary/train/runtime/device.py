"""The device of a rank: settings of torch's CUDA allocator, peak FLOP/s and peak memory."""

from __future__ import annotations

import os
import resource
import sys
from typing import Any, cast

import torch

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that torch reads; the second is the older name."""
EXPANDABLE = "expandable_segments"

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L20": 119.5e12}
"""Peak of dense bfloat16 FLOP/s, the denominator of MFU, by a word in the device's name; H100 as SXM."""


def allocator_settings(expandable: bool) -> str | None:
    """Returns the environment's settings with expandable segments added; None if they need no change.

    A setting of expandable segments in the environment takes precedence.
    """
    settings = next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    if not expandable or EXPANDABLE in settings:
        return None
    return ",".join(filter(None, (settings, f"{EXPANDABLE}:True")))


def set_allocator(settings: str | None) -> None:
    """Applies settings in the format of PYTORCH_ALLOC_CONF, unless None. Must run before GPU memory is allocated."""
    if settings is not None:
        cast(Any, torch)._C._accelerator_setAllocatorSettings(settings)


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
