"""Settings of torch's allocator on CUDA, besides those of the environment."""

from __future__ import annotations

import os

from armillary.core import compat

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch reads settings of its allocator from; the second is the older name."""
EXPANDABLE = "expandable_segments"


def allocator_settings(expandable: bool) -> str | None:
    """What to give the allocator, besides what the user has set; None: nothing. What they say of segments counts."""
    given = next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    if not expandable or EXPANDABLE in given:
        return None
    return ",".join(filter(None, (given, f"{EXPANDABLE}:True")))


def set_allocator(settings: str | None) -> None:
    """Gives the allocator its settings, if there are any; before anything is allocated."""
    if settings is not None:
        compat.set_allocator(settings)
