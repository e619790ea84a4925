"""One gloo device for all process groups of a rank.

torch creates a device for each group, whose thread wakes up a hundred times a second. Long-lived ranks of tests have
hundreds of groups: the threads of as many devices would take most of a core.
"""

from __future__ import annotations

from datetime import timedelta
from functools import wraps
from typing import Any, cast

import torch.distributed as dist

THREADS = 2
"""Threads that run the operations of one group; the number that torch uses."""


def share_device() -> None:
    """Makes all gloo groups that this process creates from now on share one device. Uses private options of torch."""
    gloo = cast(Any, dist).ProcessGroupGloo
    original, device = gloo.__init__, gloo.create_default_device()

    @wraps(original)
    def init_with_shared_device(
        group: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: object
    ) -> None:
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [device], THREADS, timeout
        original(group, store, rank, size, options)

    # torch creates every gloo group through this constructor.
    gloo.__init__ = init_with_shared_device
