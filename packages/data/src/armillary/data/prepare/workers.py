"""A process pool that yields results in the order of the items."""

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


def cpu_count() -> int:
    """Returns the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_order(work: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    """Yields `work(item)` for each item, in order, computed in worker processes. With one worker, in this process.

    Raises:
        ChildProcessError: a process was killed, most likely for lack of memory.
    """
    workers = min(workers, len(items))
    if workers <= 1:
        yield from map(work, items)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__class__.__module__])  # imported once, not in each worker
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker)
    try:
        # Two items in flight for each worker: one is computed while the other waits, so that no worker idles, and the
        # number of results in memory stays bounded.
        queue = iter(items)
        in_flight = deque(pool.submit(work, item) for item in islice(queue, 2 * workers))
        while in_flight:
            yield in_flight.popleft().result()
            in_flight.extend(pool.submit(work, item) for item in islice(queue, 1))
    except BrokenProcessPool as error:  # raised by `result` or by `submit`
        text = f"one of {workers} worker processes was killed, as happens when memory is short; take fewer workers"
        raise ChildProcessError(ECHILD, text) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Initializes a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Waits for the parent process to end, then ends this worker, which nobody else would end after a kill."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
