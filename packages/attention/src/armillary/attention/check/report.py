"""The report of `check_model`: a table for people, a dictionary for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from armillary.attention.check.compare import Comparison, TensorError
from armillary.attention.check.diagnose import Diagnosis, Evidence, diagnose, list_names, spans
from armillary.attention.check.method import align_columns

NOT_CHECKED = ("GPU kernels (all ranks run on the CPU)", "dropout, if the step uses any", "speed and memory")


@dataclass(frozen=True)
class ModelReport:
    """The errors of one model on shards, relative to one rank.

    Args:
        evidence: all comparisons.
        notes: lines on tensors and variants that were not compared, with the reason.
        seconds: wall time of the check.
        title: lines on the model and the method, above the table.
    """

    evidence: Evidence
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    title: str = ""

    @property
    def right(self) -> bool:
        return self.evidence.right

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """The mistakes whose signatures fit the errors; none if everything is right."""
        return diagnose(self.evidence)

    def assert_right(self) -> None:
        """Raises AssertionError that names the mistakes and each wrong tensor."""
        wrong = [
            f"{name}: {x.name} off by {x.error:.2g} (limit {x.limit:.2g})"
            for name, comparison in self.evidence.comparisons.items()
            for x in comparison.tensors
            if x.wrong
        ]
        assert self.right, "\n".join([*map(str, self.diagnoses), *wrong])

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return {
            "title": self.title,
            "right": self.right,
            "diagnoses": [{"mistake": x.mistake.name.lower(), "evidence": x.evidence} for x in self.diagnoses],
            "runs": {name: _run_dict(x) for name, x in self.evidence.comparisons.items()},
            "notes": list(self.notes),
            "seconds": round(self.seconds, 1),
        }

    def __str__(self) -> str:
        rows = [("run", "loss", "logits", "gradients", "worst gradient")]
        rows += [_row(name, comparison) for name, comparison in self.evidence.comparisons.items()]
        run = self.evidence.plain.run
        limit = min(x.limit for x in self.evidence.plain.tensors)  # higher for tensors that rounding affects more
        lines = [self.title] if self.title else []
        lines += [
            f"{run.ranks} ranks against one: {run.rows} x {run.tokens} tokens, {str(run.dtype)[6:]}.",
            f"Errors are relative to one rank's norms; up to {limit:.0e} is right.",
            "",
            *align_columns(rows),
            "",
        ]
        for diagnosis in self.diagnoses:
            lines += [f"WRONG: {diagnosis.mistake}", f"  {diagnosis.evidence}"]
        lines += _wrong_tensors(self.evidence) if not self.right else ["RIGHT"]
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join([*lines, f"Not checked: {'; '.join(NOT_CHECKED)}."])


def _row(name: str, comparison: Comparison) -> tuple[str, ...]:
    logits = comparison.token_error("logits")
    worst = max(comparison.gradients, key=lambda x: x.error, default=None)
    wrong = len(comparison.wrong_gradients)
    return (
        name,
        _cell(comparison.loss),
        _cell(logits),
        f"{len(comparison.gradients) - wrong} of {len(comparison.gradients)} right",
        "-" if worst is None else f"{_cell(worst)} {worst.name}",
    )


def _cell(error: TensorError | None) -> str:
    return "-" if error is None else f"{error.error:.0e}{' WRONG' if error.wrong else ''}"


def _wrong_tensors(evidence: Evidence) -> list[str]:
    """Returns lines on the wrong tokens and parameters of the first wrong run."""
    comparison = evidence.first_wrong
    lines = [
        f"  {x.name}: tokens {spans(x.wrong_tokens)} are wrong"
        for x in comparison.tokens
        if x.wrong and x.wrong_tokens.any()
    ]
    if wrong := comparison.wrong_gradients:
        lines.append(f"  gradients of {list_names([x.name for x in wrong])} are wrong")
    if comparison.shards:
        shards = "; ".join(spans(_mask(x, evidence)) for x in comparison.shards[:4])
        lines.append(f"  shards: {shards}{' ...' if len(comparison.shards) > 4 else ''}")
    return lines


def _mask(positions: Any, evidence: Evidence) -> Any:
    """Returns True for tokens at these positions, bool [N]."""
    mask = positions.new_zeros(evidence.plain.run.tokens).bool()
    mask[positions] = True
    return mask


def _run_dict(comparison: Comparison) -> dict[str, Any]:
    """Returns one run of the report as JSON values."""

    def value(error: float) -> float | None:
        return float(f"{error:.3g}") if error == error and error != float("inf") else None  # JSON has no infinity

    run = comparison.run
    return {
        "right": comparison.right,
        "ranks": run.ranks,
        "tokens": run.tokens,
        "dtype": str(run.dtype).removeprefix("torch."),
        "documents": None if run.documents is None else list(run.documents),
        "limit": min(x.limit for x in comparison.tensors),
        "wrong": [x.name for x in comparison.tensors if x.wrong],
        "errors": {x.name: value(x.error) for x in comparison.tensors},
        "wrong_tokens": {x.name: x.wrong_tokens.nonzero().flatten().tolist() for x in comparison.tokens if x.wrong},
        "first_wrong_output": None if (x := comparison.first_wrong_activation) is None else x.name,
    }
