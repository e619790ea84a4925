"""A stopwatch for training steps that leaves out validation and saving."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Stopwatch:
    """Counts the tokens and seconds of all steps, and the seconds of the last step, without pauses."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.tokens, self.seconds, self.last_seconds = 0, 0.0, 0.0
        self.started = self.running_since = self.clock()

    def count(self, tokens: int) -> None:
        """Ends a step of `tokens` tokens."""
        now = self.clock()
        self.last_seconds, self.running_since = now - self.running_since, now
        self.seconds, self.tokens = self.seconds + self.last_seconds, self.tokens + tokens

    @contextmanager
    def pause(self) -> Generator[None]:
        """Context manager around work that does not count as part of a step."""
        yield
        self.running_since = self.clock()

    def elapsed(self) -> float:
        """Returns the seconds since construction, including pauses."""
        return self.clock() - self.started
