"""The tuner's JSON file: settings, measurements so far, and the choice."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from armillary.core.files import write_whole
from armillary.plan.search.candidates import Candidate
from armillary.plan.tune.cache_key import Question


@dataclass(frozen=True)
class Measured:
    """A candidate and its measurements.

    Args:
        seconds: that forward and backward of a block take the slowest rank, as a median; None where it was not
            measured.
        least: of the fastest pass, likewise of the slowest rank: far below `seconds` on a machine that is disturbed.
        again: as `seconds`, measured in turns with others that are about as fast.
        memory: most bytes of the device of any rank; None on the CPU.
        reason: why there are no seconds.
    """

    candidate: Candidate
    seconds: float | None = None
    least: float | None = None
    again: float | None = None
    memory: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Tuned:
    """All that a file holds.

    Args:
        question: what was asked.
        complete: every candidate was measured, and the choice is made.
        left: candidates that are still to be measured.
        choice: the fastest; None before the end, and where nothing could be measured.
        measured: measured, or failed.
        left_out: those that the planner would not have measured.
        attempts: how often each candidate was begun that has not ended yet, by name.
    """

    question: Question
    complete: bool = False
    left: int = 0
    choice: Candidate | None = None
    measured: tuple[Measured, ...] = ()
    left_out: tuple[Measured, ...] = ()
    attempts: dict[str, int] = field(default_factory=dict[str, int])

    def known(self, candidate: Candidate) -> bool:
        """Whether it was measured, or failed."""
        return any(each.candidate == candidate for each in self.measured)

    @property
    def fastest(self) -> list[Measured]:
        """Those with seconds, the fastest first."""
        found = [(each.seconds, i, each) for i, each in enumerate(self.measured) if each.seconds is not None]
        return [each for *_, each in sorted(found)]


def read(path: Path, what: str) -> Tuned:
    """The file at `path`, which `what` names for people, such as "--out tuned.json".

    Raises:
        ValueError: it cannot be read, or is no such file.
    """
    try:
        return TypeAdapter(Tuned).validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{what}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        said = ": ".join([*([".".join(map(str, first["loc"]))] if first["loc"] else []), first["msg"]])
        raise ValueError(f"{what}: is no file of armillary-tune ({said})") from error


def write(path: Path, tuned: Tuned) -> None:
    """Replaces the file, all at once.

    Raises:
        ValueError: it cannot be written.
    """
    fields: dict[str, Any] = asdict(tuned)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda partial: partial.write_text(json.dumps(fields, indent=2) + "\n"))
    except OSError as error:
        raise ValueError(f"--out {path}: cannot be written ({error.strerror}); name another file") from error
