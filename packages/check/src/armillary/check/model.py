"""Checks a training step on shards, with any library, against the same step on one rank.

def build() -> nn.Module: ...

def step(model: nn.Module, batch: CheckBatch) -> StepOutput:
    ...  # shard the batch, forward, backward, reduce gradients
    return StepOutput(loss, positions)

def test_my_context_parallelism():
    check_model(build, step, world_size=4).assert_right()
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from armillary.attention import AttentionMask
from armillary.check.compare import MODEL_LIMITS, Comparison, TensorError, compare
from armillary.check.diagnose import Diagnosis, Evidence, diagnose, list_names, spans
from armillary.check.method import align_columns
from armillary.check.step import VOCABULARY, Build, CheckRun, RankRecord, Reduce, Step, run_step
from armillary.core.internal import integer
from armillary.core.testing import RankFailed, Worlds

VARIANTS = ("recompute", "compile", "two micro-batches")
NOT_CHECKED = ("GPU kernels (all ranks run on the CPU)", "dropout, if the step uses any", "speed and memory")


@dataclass(frozen=True)
class ModelReport:
    """The errors of one model on shards, relative to one rank.

    Args:
        evidence: all comparisons.
        notes: lines on tensors and variants that were not compared, with the reason.
        seconds: wall time of the check.
        title: lines on the model and the method, above the table.
        mechanisms: of an architecture: True for those that its copy exercises.
    """

    evidence: Evidence
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    title: str = ""
    mechanisms: Mapping[str, bool] = field(default_factory=dict[str, bool])

    @property
    def right(self) -> bool:
        return self.evidence.right

    @property
    def exercised(self) -> tuple[str, ...]:
        return tuple(name for name, is_exercised in self.mechanisms.items() if is_exercised)

    @property
    def unexercised(self) -> tuple[str, ...]:
        """Mechanisms of the architecture of which the result says nothing."""
        return tuple(name for name in self.mechanisms if name not in self.exercised)

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
        return {
            "title": self.title,
            "right": self.right,
            "diagnoses": [{"mistake": x.mistake.name.lower(), "evidence": x.evidence} for x in self.diagnoses],
            "runs": {name: _run_dict(x) for name, x in self.evidence.comparisons.items()},
            "exercised": list(self.exercised),
            "unexercised": list(self.unexercised),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 1),
        }

    def __str__(self) -> str:
        # 1. A line for each run.
        rows = [("run", "loss", "logits", "gradients", "worst gradient")]
        for name, comparison in self.evidence.comparisons.items():
            gradients, wrong = comparison.gradients, comparison.wrong_gradients
            worst = max(gradients, key=lambda x: x.error, default=None)
            right_count = f"{len(gradients) - len(wrong)} of {len(gradients)} right"
            worst_cell = "-" if worst is None else f"{_cell(worst)} {worst.name}"
            logits = comparison.token_error("logits")
            rows.append((name, _cell(comparison.loss), _cell(logits), right_count, worst_cell))
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
        # 2. The mistakes, and the wrong tokens and parameters of the first wrong run.
        for diagnosis in self.diagnoses:
            lines += [f"WRONG: {diagnosis.mistake}", f"  {diagnosis.evidence}"]
        if self.right:
            lines += [f"Exercised: {', '.join(self.exercised)}."] if self.exercised else []
            lines += [f"RIGHT, without {', '.join(self.unexercised)}" if self.unexercised else "RIGHT"]
        else:
            lines += _wrong_tensors(self.evidence.first_wrong)
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join([*lines, f"Not checked: {'; '.join(NOT_CHECKED)}."])


def _cell(error: TensorError | None) -> str:
    return "-" if error is None else f"{error.error:.0e}{' WRONG' if error.wrong else ''}"


def _wrong_tensors(comparison: Comparison) -> list[str]:
    lines = [
        f"  {x.name}: tokens {spans(x.wrong_tokens)} are wrong"
        for x in comparison.tokens
        if x.wrong and x.wrong_tokens.any()
    ]
    if wrong := comparison.wrong_gradients:
        lines.append(f"  gradients of {list_names([x.name for x in wrong])} are wrong")
    if comparison.shards:
        positions = torch.arange(comparison.run.tokens)
        shards = "; ".join(spans(torch.isin(positions, shard)) for shard in comparison.shards[:4])
        lines.append(f"  shards: {shards}{' ...' if len(comparison.shards) > 4 else ''}")
    return lines


def _run_dict(comparison: Comparison) -> dict[str, Any]:

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


def check_model(
    build: Build,
    step: Step | None = None,
    *,
    world_size: int = 4,
    tokens: int = 64,
    rows: int = 1,
    documents: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    reduce: Reduce | None = None,
    reference: Build | None = None,
    variants: Sequence[str] = ("recompute",),
    vocabulary: int = VOCABULARY,
    limit: float | None = None,
    seed: int = 0,
    timeout: float = 120.0,
    worlds: Worlds | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> ModelReport:
    """Runs one training step on one rank and on `world_size` gloo ranks; compares loss, logits, activations, gradients.

    Functions must be importable (defined at the top level of a module, or a `functools.partial` of one): each rank is a
    process. Random numbers are seeded with `seed` before `build`. A batch is [rows, tokens].

    Args:
        build: returns the model, the same on every rank; without `step`, (model, step) or (model, step, reduce).
        step: `step(model, batch)` runs this rank's part of a training step: it shards the batch, computes the loss, and
            runs backward (if it does not, the checker does). Returns a `StepOutput`, or the loss alone.
        documents: boundaries (0, ..., tokens) of a second run with packed documents.
        dtype: float64, float32, bfloat16 or float16. The expected values are always computed in float64.
        reduce: `reduce(model)` reduces gradients over ranks after the last micro-batch, if `step` and the model's own
            hooks (FSDP2, DDP) do not.
        reference: returns (model, step) for one rank, if they differ from those of `build` and `step`.
        variants: any of "recompute" (activation checkpointing around each layer), "compile" and "two micro-batches";
            each is a further run, with `documents` if they are given.
        vocabulary: token ids are below it.
        limit: largest relative error that is right; by default it depends on the dtype and one rank's rounding errors.
        timeout: seconds for one run.
        worlds: worlds whose ranks are used again; by default new ones.
        progress: called with a line about each run before it starts.

    Raises:
        ValueError: wrong arguments.
        RankFailed: a rank raised, died or hung in a run without variants. If only a run that looks for the mistake
            fails, on another number of ranks or tokens, it is left out.
    """
    integer("world_size", world_size, minimum=2)
    integer("tokens", tokens, minimum=world_size)
    integer("rows", rows, minimum=1)
    integer("vocabulary", vocabulary, minimum=5)
    if dtype not in MODEL_LIMITS:
        raise ValueError(f"dtype={dtype}: {', '.join(map(str, MODEL_LIMITS))} are accepted")
    if unknown := [variant for variant in variants if variant not in VARIANTS]:
        raise ValueError(f"variants={unknown}: {', '.join(VARIANTS)} are accepted")
    if documents is not None:
        AttentionMask(documents=list(documents)).check(tokens, tokens, rows)
    start_time = time.monotonic()
    with closing(Worlds()) if worlds is None else nullcontext(worlds) as open_worlds:
        sharded = build, step, reduce
        unsharded = sharded if reference is None else (reference, None, None)
        runs = _Runs(open_worlds, sharded, unsharded, limit, timeout, progress)
        # 1. One document per row.
        plain_run = CheckRun(
            world_size, tokens, rows=rows, vocabulary=vocabulary, dtype=dtype, weight_dtype=dtype, seed=seed
        )
        records = runs.sharded_records(plain_run)
        plain = runs.compare(plain_run, records)
        # 2. Packed documents.
        boundaries = None if documents is None else tuple(int(end) for end in documents)
        packed_run = replace(plain_run, documents=boundaries)
        packed = None if boundaries is None else runs.compare(packed_run)
        # 3. Variants. A model may not support all of them, so a failure is only noted.
        notes = _notes(plain)
        compared = dict[str, Comparison]()
        for variant in variants:
            try:
                compared[variant] = runs.compare(replace(packed_run, variant=variant))
            except RankFailed as failure:
                notes.append(f"{variant} was not compared: {error_line(failure)}")
        evidence = Evidence(plain, packed, compared)
        # 4. Runs by which `diagnose` tells mistakes apart.
        if not plain.right:
            evidence = _add_diagnostic_runs(evidence, records, runs)
    return ModelReport(evidence, tuple(notes), time.monotonic() - start_time)


def error_line(failure: RankFailed) -> str:
    """Returns the first line of the first failed rank's exception, such as "ValueError: ..."."""
    lines = str(failure).splitlines()
    raised = next((i for i, line in enumerate(lines) if line.endswith("raised:")), None)
    if raised is None:  # ranks died or hung
        return lines[1]
    # The message has the traceback of each rank that raised; the exception follows a traceback's last frame.
    next_ranks = [i for i, line in enumerate(lines) if re.match(r"rank \d+ ", line) and i > raised]
    traceback = lines[raised + 1 : next_ranks[0] if next_ranks else None]
    last_frame = max(i for i, line in enumerate(traceback) if line.startswith("  File "))
    return next((line for line in traceback[last_frame + 1 :] if line and not line.startswith(" ")), traceback[-1])


@dataclass(frozen=True)
class _Runs:
    """Runs of a step on shards, compared with one rank in float64, which runs once for each batch.

    Args:
        sharded, unsharded: (build, step, reduce) of the checked model and of the model on one rank.
    """

    worlds: Worlds
    sharded: tuple[Build, Step | None, Reduce | None]
    unsharded: tuple[Build, Step | None, Reduce | None]
    limit: float | None
    timeout: float
    progress: Callable[[str], object]
    one_rank: dict[CheckRun, tuple[RankRecord, RankRecord | None]] = field(default_factory=dict)
    """Run on one rank in float64 -> (its record, the record with other rounding, or None if a limit is given)."""

    def compare(self, run: CheckRun, records: Sequence[RankRecord] | None = None) -> Comparison:
        records = self.sharded_records(run) if records is None else records
        # Recompute and compile must not change any number: they are compared with the plain step of one rank.
        variant = run.variant if run.variant == "two micro-batches" else "plain"
        exact_run = replace(run, ranks=1, variant=variant, dtype=torch.float64)
        if exact_run not in self.one_rank:
            # A second record with other rounding: in the run's dtype, or for float64 with weights changed by ROUNDING.
            rounded_run = replace(exact_run, dtype=run.dtype, perturbed=run.dtype is torch.float64)
            (exact,) = self._records(exact_run, self.unsharded)
            (rounded,) = self._records(rounded_run, self.unsharded) if self.limit is None else (None,)
            self.one_rank[exact_run] = (exact, rounded)
        return compare(run, records, *self.one_rank[exact_run], self.limit)

    def sharded_records(self, run: CheckRun) -> list[RankRecord]:
        return self._records(run, self.sharded)

    def _records(self, run: CheckRun, training: tuple[Build, Step | None, Reduce | None]) -> list[RankRecord]:
        packed = "" if run.documents is None else ", packed documents"
        ranks = f"{run.ranks} ranks" if run.ranks > 1 else "1 rank"
        self.progress(f"{run.variant} on {ranks}, {run.tokens} tokens{packed}")
        return self.worlds(run.ranks).run(run_step, *training, run, timeout=self.timeout)


def _add_diagnostic_runs(evidence: Evidence, records: Sequence[RankRecord], runs: _Runs) -> Evidence:
    """Adds runs by which `diagnose` tells mistakes apart: another number of ranks, more tokens, another first token."""
    run = evidence.plain.run
    # Half the ranks, or twice as many if half were one: one rank is the reference.
    other = replace(run, ranks=run.ranks // 2 if run.ranks > 3 else 2 * run.ranks)
    comparisons = list[Comparison | None]()
    for variation in (other, replace(run, tokens=2 * run.tokens)):
        try:
            comparisons.append(runs.compare(variation))
        except RankFailed:  # the step may work only with the given number of ranks or tokens
            comparisons.append(None)
    # If attention stays within shards, the first token does not reach logits of ranks without it.
    reaches = None
    if evidence.plain.token_error("logits") is not None and not evidence.plain.forward_right:
        changed = runs.sharded_records(replace(run, changed_token=True))
        pairs = [
            (before.logits, after.logits)
            for before, after in zip(records, changed, strict=True)
            if before.positions is not None and 0 not in before.positions
        ]
        if pairs:  # none if every rank has the first token, as on a tensor-parallel axis
            reaches = any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs)
    return replace(evidence, other_ranks=comparisons[0], longer=comparisons[1], first_token_reaches=reaches)


def _notes(comparison: Comparison) -> list[str]:
    notes = list[str]()
    if not comparison.shards:
        notes.append("the step reports no positions, so that logits and activations were not compared")
    elif comparison.token_error("logits") is None:
        notes.append("logits were not compared: the model's output is not [B, T, V] with a gradient")
    if comparison.loss_is_share:
        notes.append("ranks report shares of the loss; their sum or mean is right")
    if comparison.untrained:
        notes.append(f"parameters without a gradient on one rank: {list_names(comparison.untrained)}")
    return notes
