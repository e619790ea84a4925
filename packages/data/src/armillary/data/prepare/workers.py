"""Work spread over processes, its results in the order of the work."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from errno import ECHILD
from itertools import islice
from multiprocessing.connection import wait
from threading import Thread
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    """`map(work, items)` by that many processes, two items for each of them under way; one works right here.

    Raises:
        ChildProcessError: a process was killed, most likely for want of memory.
    """
    workers = min(workers, len(items))
    if workers <= 1:
        yield from map(work, items)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__class__.__module__])
    pool = ProcessPoolExecutor(workers, context, initializer=_begin)
    try:
        rest = iter(items)
        coming = deque(pool.submit(work, item) for item in islice(rest, 2 * workers))
        while coming:
            yield coming.popleft().result()
            coming.extend(pool.submit(work, item) for item in islice(rest, 1))
    except BrokenProcessPool as error:  # by a result, or by handing out work
        text = f"one of {workers} worker processes was killed, as happens when memory is short; take fewer workers"
        raise ChildProcessError(ECHILD, text) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """In each worker: an interrupt is the parent's to handle, one process has one thread, and no worker outlives it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # how that library is told
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
