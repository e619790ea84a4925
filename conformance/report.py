"""The report of a run: progress, failures as they occur, and a table."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from armillary.core.internal import writing
from armillary.data.console import Column, print_table
from conformance.draw import KINDS_OF_CASES, Trial
from conformance.run import Verdict

HEADS = (
    *(Column(name, text=True) for name in ("method", "dtype")),
    *map(Column, ("cases", "failed", "worst error (share of its limit)")),
    Column("worst case", text=True, own_line=True),
)


@dataclass
class ReportRow:
    """One line of the table: a method in one dtype."""

    method: str
    dtype: str
    cases: int = 0
    failed: int = 0
    worst: float = 0.0
    tensor: str = ""
    worst_case: str = ""

    def cells(self) -> list[str]:
        case = f"{self.tensor}, {self.worst_case}"
        return [self.method, self.dtype, str(self.cases), str(self.failed), f"{self.worst:.2g}", case]

    def add(self, trial: Trial, verdict: Verdict) -> None:
        self.cases += 1
        self.failed += bool(verdict.failure)
        if verdict.fraction > self.worst:
            self.worst, self.tensor = verdict.fraction, verdict.tensor
            self.worst_case = f"{trial.composition}: {trial.case}"


@dataclass
class Report:
    """Collects verdicts.

    Args:
        total: number of verdicts to expect.
        drawn: True for random cases, which failures name by seed and number.
        file: path of the result as JSON. It is written every ten seconds, because a long run may be interrupted.
    """

    total: int
    drawn: bool
    file: Path | None = None
    rows: dict[tuple[str, str], ReportRow] = field(default_factory=dict[tuple[str, str], ReportRow])
    failures: list[str] = field(default_factory=list[str])
    counts: Counter[str] = field(default_factory=Counter[str])
    started: float = field(default_factory=time.monotonic)
    last_progress: float = 0.0

    def add(self, trial: Trial, verdict: Verdict) -> None:
        """Adds a verdict, and prints progress every ten seconds."""
        method, dtype = trial.composition.method, str(trial.case.dtype).removeprefix("torch.")
        self.rows.setdefault((method, dtype), ReportRow(method, dtype)).add(trial, verdict)
        self.counts.update(["cases", *(name for name, of in KINDS_OF_CASES.items() if of(trial))])
        if verdict.failure:
            options = f"--seed {trial.seed} --case {trial.number}: " if self.drawn else ""
            self.failures.append(f"{options}{trial.composition}: {trial.case}: {verdict.failure}")
            print(f"FAILED {self.failures[-1]}", flush=True)
        if self.seconds - self.last_progress > 10 or self.counts["cases"] == self.total:
            self.last_progress = self.seconds
            self._progress()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def _progress(self) -> None:
        count = self.counts["cases"]
        remaining = self.seconds * (self.total / count - 1)
        failed = f"{len(self.failures)} failed"
        print(f"[{count}/{self.total}] {failed}, {self.seconds:.0f} s, about {remaining:.0f} s to go", flush=True)
        if self.file is not None:
            with writing(self.file):
                self.file.write_text(json.dumps(self.values(), indent=2) + "\n")

    def values(self) -> dict[str, Any]:
        """Returns the result, for a file."""
        rows = [vars(row) for row in self.rows.values()]
        run = {"torch": torch.__version__, "seconds": round(self.seconds), "tried": dict(self.counts)}
        return run | {"rows": rows, "failures": self.failures}

    def show(self, methods: Sequence[str]) -> None:
        """Prints the table, with methods in this order, and all failures."""
        rows = sorted(self.rows.values(), key=lambda row: (methods.index(row.method), row.dtype))
        print()
        print_table(HEADS, (row.cells() for row in rows))
        kinds = ", ".join(f"{self.counts[name]} {name}" for name in KINDS_OF_CASES if self.counts[name])
        print(f"\nAmong them: {kinds}" if kinds else "")
        print("\n".join(f"FAILED {failure}" for failure in self.failures), end="\n" if self.failures else "")
        print(f"{self.counts['cases']} cases, {len(self.failures)} failed, {self.seconds:.0f} s")
