"""How long steps take, without what lies between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Stopwatch:
    """Tokens and seconds of steps, in all and of the last one, pauses excluded."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.tokens, self.seconds, self.last_seconds = 0, 0.0, 0.0
        self.started = self.running_since = self.clock()

    def count(self, tokens: int) -> None:
        """Counts `tokens` as trained on since the last call."""
        now = self.clock()
        self.last_seconds, self.running_since = now - self.running_since, now
        self.seconds, self.tokens = self.seconds + self.last_seconds, self.tokens + tokens

    @contextmanager
    def paused(self) -> Generator[None]:
        """Time within is not counted."""
        yield
        self.running_since = self.clock()

    def elapsed(self) -> float:
        """Seconds since construction, pauses included."""
        return self.clock() - self.started
