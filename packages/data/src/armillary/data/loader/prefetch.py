"""Making what comes next in the background, while what is there is being used."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Things by number, made by one thread ahead of being asked for.

    Args:
        make: called in the thread, with one number at a time. What it raises, `get` raises for that number, with its
            traceback; asked again, it is made again, so a disk that comes back is no reason to stop.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._coming: dict[int, Future[T]] = {}

    def get(self, number: int, ahead: Sequence[int] = ()) -> T:
        """The thing of that number; those of the numbers in `ahead` are begun, any others are forgotten."""
        if self._process != os.getpid():
            self._begin()  # in a fork there is no such thread
        wanted = [number, *ahead]
        for other in self._coming.keys() - set(wanted):
            self._coming.pop(other).cancel()
        for n in wanted:
            if n not in self._coming:
                self._coming[n] = self._thread.submit(self._make, n)
        return self._coming.pop(number).result()
