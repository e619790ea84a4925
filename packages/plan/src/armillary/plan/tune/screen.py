"""Progress on the terminal: a line for each candidate, and a progress bar below."""

from __future__ import annotations

from typing import Self

from armillary.data.progress import Bar
from armillary.plan.tune.measurements import Measured, Tuned


class TunerScreen:
    """Shows progress on rank 0, and nothing elsewhere."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.bar = Bar("tuning", quiet=rank > 0)

    def begins(self, known: int, total: int, left_out: int) -> None:
        """So many of all candidates are known already."""
        parts = [f"{total} candidate{'' if total == 1 else 's'}"]
        parts += [f"{left_out} more left out by prediction"] if left_out else []
        parts += [f"{known} measured before"] if known else []
        self.say(", ".join(parts))
        self.bar.show("tuning", known, total)

    def measured(self, number: int, total: int, found: Measured, tuned: Tuned) -> None:
        """A candidate was measured, or failed."""
        self.bar.show("tuning", number, total)
        self.say(f"{number}/{total} {line(found, tuned)}")

    def compares(self, count: int) -> None:
        """The nearest are measured again."""
        self.bar.show("comparing")
        self.say(f"the {count} fastest again, in turns")

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.__exit__(None, None, None)


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
