"""Chrome traces of chosen steps: compute and communication of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from armillary.core import Trace, span


class StepTrace:
    """Writes one `armillary.core.Trace` of chosen steps on all ranks; does nothing in all others.

    Args:
        path: of the file; None: no steps are traced.
        steps: to trace; by default the second of this start.
        first, last: steps that this start of the run makes.
        say: called with a line about what could not be written; training continues.
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
        chosen = steps or (min(first + 1, last),)
        self._left = {step for step in chosen if first <= step <= last} if self.path else set[int]()
        if self.path and not self._left and first <= last:
            never = ", ".join(map(str, chosen))
            say(f"{self.path}: no trace is written, for steps {first} to {last} are none of {never}")

    @contextmanager
    def step(self, step: int) -> Generator[None]:
        """Around all that belongs to a step."""
        if step not in self._left:
            yield
            return
        with self.trace, span(f"step {step}", "label"):
            yield
        self._left.remove(step)
        if not self._left:
            self._write()

    def finish(self) -> None:
        """The run ends. If that is before all chosen steps were made, writes those that were."""
        if self._left and self.trace.spans:
            self._write()

    def _write(self) -> None:
        assert self.path is not None
        try:
            self.trace.write(self.path)
        except OSError as error:
            self.say(f"{self.path}: not written ({type(error).__name__}: {error})")
