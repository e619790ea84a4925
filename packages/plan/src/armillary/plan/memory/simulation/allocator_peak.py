"""Peak of torch's CPU allocator, to validate simulations with."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any, cast

from torch.profiler import ProfilerActivity, profile


def measured_peak(work: Callable[[], object]) -> int:
    """Runs `work` and returns the peak of the bytes that it allocates on the CPU.

    Reads the allocator events of torch's profiler. So memory that kernels allocate inside of an op counts too, and no
    dispatch mode changes how torch executes.
    """
    gc.collect()  # garbage from before that is freed during `work` would count as negative bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = cast(Any, profiler).profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])
    return max(accumulate((size for _, size in changes), initial=0))
