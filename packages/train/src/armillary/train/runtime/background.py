"""A thread beside training that runs a task and keeps its error."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread


class Background(Thread):
    """A thread that runs `work`, started by the constructor. `raise_error` raises the error of `work`.

    The thread is a daemon: when the main thread ends with an error, the process does not wait for `work`, which may be
    waiting for missing ranks.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.work, self.error = work, None
        self.start()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error

    def raise_error(self) -> None:
        """Raises the error of `work`, if there was one. Call it when the thread has ended."""
        if self.error is not None:
            raise self.error
