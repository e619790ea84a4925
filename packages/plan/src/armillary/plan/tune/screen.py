"""Progress on the terminal: a line for each candidate, and a progress bar below."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from armillary.plan.tune.file import Measured, Tuned


class TunerScreen:
    """Shows progress on rank 0, and nothing elsewhere."""

    def __init__(self, rank: int) -> None:
        self.console = Console(highlight=False, soft_wrap=True, quiet=rank > 0)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=rank > 0 or not self.console.is_terminal,
        )
        self._task: TaskID | None = None

    def begins(self, known: int, total: int, left_out: int) -> None:
        """So many of all candidates are known already."""
        parts = [f"{total} candidate{'' if total == 1 else 's'}"]
        parts += [f"{left_out} more left out by prediction"] if left_out else []
        parts += [f"{known} measured before"] if known else []
        self.say(", ".join(parts))
        self._task = self.progress.add_task("tuning", total=total, completed=known)
        self.progress.start()

    def measured(self, number: int, total: int, found: Measured, tuned: Tuned) -> None:
        """A candidate was measured, or failed."""
        if self._task is not None:
            self.progress.update(self._task, completed=number)
        self.say(f"{number}/{total} {line(found, tuned)}")

    def compares(self, count: int) -> None:
        """The nearest are measured again."""
        if self._task is not None:
            self.progress.update(self._task, description="comparing")
        self.say(f"the {count} fastest again, in turns")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)
        self.console.file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()


def line(found: Measured, tuned: Tuned) -> str:
    """Such as "ring on ring 8: 1.24 s (best 1.10 s: ulysses on ulysses 8)"."""
    if found.seconds is None:
        return f"{found.candidate}: {found.reason}"
    best = tuned.fastest[0]
    so_far = "the best" if best == found else f"best {seconds(best.seconds)}: {best.candidate}"
    return f"{found.candidate}: {seconds(found.seconds)} ({so_far})"


def seconds(value: float | None) -> str:
    """For people: three digits, in seconds or milliseconds."""
    value = value or 0.0
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
