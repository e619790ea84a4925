"""Runs a contender's cases on worlds of ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from contender import Contender
from setting import Setting

from armillary.core.testing import RankFailed, World
from conformance import LIMITS, ErrorAndLimit, errors
from conformance.run import error_line_of

PATIENCE = 120.0
"""Seconds after which a case that runs alone counts as hung."""
ROUGH = 10.0
"""A result within this multiple of its limit (in float64: of float32's limit) is rough, not wrong."""
OUTCOMES = ("right", "rough", "wrong", "refused", "hung", "crashed")


@dataclass(frozen=True)
class Outcome:
    """Result of one case: relative (error, limit) of each tensor, and the message of a refusal."""

    setting: str
    outcome: str
    errors: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    said: str = ""

    @property
    def worst(self) -> float:
        """The largest error as a fraction of its limit."""
        return max((ErrorAndLimit(*each).fraction for each in self.errors.values()), default=0.0)


def run(cls: type[Contender], settings: Sequence[Setting], patience: float = PATIENCE) -> Iterator[Outcome]:
    """Yields the outcome of each setting. Ranks that raised or hung are replaced: unread messages may remain."""
    with TemporaryDirectory() as folder:
        for ranks in sorted({setting.ranks for setting in settings}):
            remaining = [setting for setting in settings if setting.ranks == ranks]
            file = Path(folder) / f"{ranks}.jsonl"
            with World(ranks, timeout=10 * patience) as world:  # ranks that wait for a hung one must not time out first
                while remaining:
                    file.write_text("")
                    failed = _run_chunk(world, cls, remaining[:CHUNK], file, patience)
                    outcomes = [Outcome(**json.loads(line)) for line in file.read_text().splitlines()]
                    yield from outcomes
                    remaining = remaining[len(outcomes) :]
                    if failed is not None and (
                        not outcomes or _outcome_of_failure(failed)[0] != "hung"
                    ):  # a hung case of several is repeated alone
                        yield Outcome(str(remaining.pop(0)), *_outcome_of_failure(failed))


CHUNK = 40
"""Cases per call of a world."""


def _run_chunk(
    world: World, cls: type[Contender], settings: Sequence[Setting], file: Path, patience: float
) -> str | None:
    """The reason why ranks failed, or None; `file` has the outcomes of the cases before."""
    try:
        world.run(try_all, cls, settings, file, timeout=patience)
    except RankFailed as failure:
        return str(failure)
    return None


def _outcome_of_failure(failure: str) -> tuple[str, dict[str, tuple[float, float]], str]:
    """The outcome for a world's error message. If a rank raised, it is a refusal, even if others hung."""
    died = re.search(r"^rank \d+ died.*$", failure, re.MULTILINE)
    if died is None and "raised:" in failure:
        return "refused", {}, error_line_of(failure)
    return ("crashed", {}, died[0]) if died else ("hung", {}, failure.splitlines()[1])


def try_all(cls: type[Contender], settings: Sequence[Setting], file: Path) -> None:
    """Runs all settings on one rank until one raises. Rank 0 writes outcomes to `file`."""
    torch.set_num_threads(1)
    for setting in settings:
        outcome = judge_setting(cls, setting)
        if dist.get_rank() == 0:
            with file.open("a") as lines:
                lines.write(json.dumps(asdict(outcome)) + "\n")


def judge_setting(cls: type[Contender], setting: Setting) -> Outcome:
    """The outcome of one setting. Exceptions of the contender propagate."""
    case = setting.case(cls.batch, cls.forward_only)
    try:
        off = errors(cls(setting).method(), case)
    except AssertionError as complaint:  # the suite's errors begin with the case; others are the contender's
        if not str(complaint).startswith(f"{case}: "):
            raise
        return Outcome(str(setting), "wrong", {}, str(complaint).removeprefix(f"{case}: "))
    measured = {name: (float(f"{each.error:.3g}"), float(f"{each.limit:.3g}")) for name, each in off.items()}
    return Outcome(str(setting), verdict(list(off.values())), measured)


def verdict(off: Sequence[ErrorAndLimit]) -> str:
    """Returns "right", "rough" or "wrong" for all tensors."""
    if all(each.fraction <= 1 for each in off):
        return "right"
    tolerant = all(each.error <= ROUGH * max(each.limit, LIMITS[torch.float32]) for each in off)
    return "rough" if tolerant else "wrong"
