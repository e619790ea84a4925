"""Prints the tuner's progress: a line for each candidate, above a progress bar."""

from __future__ import annotations

from typing import Self

from armillary.data.console import Bar
from armillary.plan.tune.measurements import Measurement, TunerState


class TunerScreen:
    """Shows progress on rank 0 and nothing on other ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.bar = Bar("tuning", quiet=rank > 0)

    def show_start(self, total: int, state: TunerState) -> None:
        """Prints the number of candidates, and how many of them are excluded or measured already."""
        counts = [f"{total} candidate{'' if total == 1 else 's'}"]
        counts += [f"{len(state.excluded)} more excluded by prediction"] if state.excluded else []
        measured_count = total - state.remaining
        counts += [f"{measured_count} measured before"] if measured_count else []  # by an earlier run
        self.print(", ".join(counts))
        self.bar.show("tuning", measured_count, total)

    def show_measurement(self, number: int, total: int, measurement: Measurement, state: TunerState) -> None:
        """Prints a line such as "2/7 ring on ring 8: 1.24 s (best 1.13 s: ulysses on ulysses 8)"."""
        self.bar.show("tuning", number, total)
        outcome = measurement.reason
        if measurement.seconds is not None:
            best = state.fastest_first[0]
            comparison = "the best" if best == measurement else f"best {short_time(best.seconds)}: {best.candidate}"
            outcome = f"{short_time(measurement.seconds)} ({comparison})"
        self.print(f"{number}/{total} {measurement.candidate}: {outcome}")

    def show_finalists(self, count: int) -> None:
        """Announces the comparison of the fastest candidates."""
        self.bar.show("comparing")
        self.print(f"the {count} fastest again, in turns")

    def print(self, text: str) -> None:
        """Prints a line on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.__exit__(None, None, None)


def short_time(seconds: float | None) -> str:
    """Formats seconds with at most three digits, in seconds or milliseconds."""
    seconds = seconds or 0.0
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
