"""Computing again later as it was computed now."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


def as_now(device_type: str) -> Callable[[], torch.autocast]:
    """A context in which autocast is what it is now; for backward passes, which compute again and run outside it."""
    enabled = torch.is_autocast_enabled(device_type)
    return partial(torch.autocast, device_type, dtype=torch.get_autocast_dtype(device_type), enabled=enabled)
