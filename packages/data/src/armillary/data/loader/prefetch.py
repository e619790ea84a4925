"""Prefetching in a thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Numbered items, such as batches, which one thread makes before they are needed.

    Args:
        make: makes the item with a given number; called in the thread. `get` raises an exception of `make` with its
            traceback, and the next `get` of that number calls `make` again, so a run survives a disk that recovers.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._start_thread()

    def _start_thread(self) -> None:
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._futures: dict[int, Future[T]] = {}

    def get(self, number: int, ahead: Sequence[int] = ()) -> T:
        """Returns item `number`, starts making the items in `ahead`, and discards all other items."""
        if self._process != os.getpid():
            self._start_thread()  # threads do not survive a fork
        numbers = [number, *ahead]
        for obsolete in self._futures.keys() - set(numbers):
            self._futures.pop(obsolete).cancel()
        for n in numbers:
            if n not in self._futures:
                self._futures[n] = self._thread.submit(self._make, n)
        return self._futures.pop(number).result()
