"""What really was allocated on the CPU: an independent witness for simulations."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any, cast

from torch.profiler import ProfilerActivity, profile


def measured_peak(work: Callable[[], object]) -> int:
    """The most bytes that `work` held at once of the CPU allocator, above what was held before.

    Counts every allocation of torch's, those inside kernels too. Nothing watches the ops themselves, so that torch does
    what it does without a watcher.
    """
    gc.collect()  # else what an earlier measurement has left may be freed in this one, and count as less than nothing
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = cast(Any, profiler).profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])
    return max(accumulate((change for _, change in changes), initial=0))
