"""A Chrome trace of chosen steps: compute and communication of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from armillary.core import Trace, span


class StepTrace:
    """Writes one file with an `armillary.core.Trace` of chosen steps of all ranks, on rank 0. Every rank must use it.

    Args:
        path: path of the file; None: no trace.
        steps: steps to trace; by default the second step after the start or restart.
        first, last: the first and the last step that this run trains, after a restart if there was one.
        say: called with a line about a file that could not be written; training continues.
    """

    def __init__(
        self,
        path: Path | None,
        steps: Sequence[int],
        device: torch.device,
        first: int,
        last: int,
        say: Callable[[str], None],
    ) -> None:
        self.path, self.say, self.trace = path, say, Trace(device.type)
        trace_steps = steps or (min(first + 1, last),)
        self._remaining = {step for step in trace_steps if first <= step <= last} if self.path else set[int]()
        if self.path and not self._remaining and first <= last:
            numbers = ", ".join(map(str, trace_steps))
            say(f"{self.path}: no trace is written, for steps {first} to {last} are none of {numbers}")

    @contextmanager
    def step(self, step: int) -> Generator[None]:
        """Context manager around a step."""
        if step not in self._remaining:
            yield
            return
        with self.trace, span(f"step {step}", "label"):
            yield
        self._remaining.remove(step)
        if not self._remaining:
            self._write()

    def finish(self) -> None:
        """Writes the traced steps if the run ends before all chosen ones."""
        if self._remaining and self.trace.spans:
            self._write()

    def _write(self) -> None:
        assert self.path is not None
        try:
            self.trace.write(self.path)
        except OSError as error:
            self.say(f"{self.path}: not written ({type(error).__name__}: {error})")
