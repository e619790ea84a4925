"""What accelerators could compute at most, which an MFU is a share of."""

from __future__ import annotations

import torch

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L20": 119.5e12}
"""Dense bfloat16 FLOP/s, by a part of the device's name."""


def peak_flops(device: torch.device) -> float | None:
    """The device's peak in bfloat16 FLOP/s, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
