"""One gloo device for all process groups of a rank.

torch gives each group a device of its own, whose thread wakes a hundred times a second. Ranks that stay up for many
tests build hundreds of groups, and then do little else.
"""

from __future__ import annotations

from datetime import timedelta
from functools import wraps
from typing import Any, cast

import torch.distributed as dist

THREADS = 2
"""That carry out the operations of one group: as many as torch starts."""


def share_device() -> None:
    """From here on, groups of this process that are made with a timeout share one device. Takes the private options."""
    gloo = cast(Any, dist).ProcessGroupGloo
    made, device = gloo.__init__, gloo.create_default_device()

    @wraps(made)
    def shared(group: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: object) -> None:
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [device], THREADS, timeout
        made(group, store, rank, size, options)

    gloo.__init__ = shared
