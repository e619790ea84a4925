"""Settings of torch's CUDA allocator, in addition to the environment's."""

from __future__ import annotations

import os
from typing import Any, cast

import torch

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that torch reads; the second is the older name."""
EXPANDABLE = "expandable_segments"


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
