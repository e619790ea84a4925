"""Running a contender's cases on worlds of ranks, and what came of each."""

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
from conformance import LIMITS, Off, errors
from conformance.run import in_a_line

PATIENCE = 120.0
"""Seconds after which a case hangs, if it is tried alone."""
ROUGH = 10.0
"""A result over its limit, but within so many times it (of float32's, in float64), has lost digits. It is not wrong."""
OUTCOMES = ("right", "rough", "wrong", "refused", "hung", "crashed")


@dataclass(frozen=True)
class Outcome:
    """What came of one case: errors of each tensor and their limits, relative to the tensor's norm; what was said."""

    setting: str
    outcome: str
    errors: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    said: str = ""

    @property
    def worst(self) -> float:
        """The largest error as a share of its limit."""
        return max((Off(*each).fraction for each in self.errors.values()), default=0.0)


def run(cls: type[Contender], settings: Sequence[Setting], patience: float = PATIENCE) -> Iterator[Outcome]:
    """The outcome of each setting. Ranks that raised or hang are replaced, for they may have left messages unread."""
    with TemporaryDirectory() as folder:
        for ranks in sorted({setting.ranks for setting in settings}):
            left = [setting for setting in settings if setting.ranks == ranks]
            file = Path(folder) / f"{ranks}.jsonl"
            with World(ranks, timeout=10 * patience) as world:  # whoever waits for one that hangs is to wait longer
                while left:
                    file.write_text("")
                    failed = _tried(world, cls, left[:CHUNK], file, patience)
                    done = [Outcome(**json.loads(line)) for line in file.read_text().splitlines()]
                    yield from done
                    left = left[len(done) :]
                    if failed is not None and (not done or _explained(failed)[0] != "hung"):  # else it is tried alone
                        yield Outcome(str(left.pop(0)), *_explained(failed))


CHUNK = 40
"""Cases for each call to a world."""


def _tried(world: World, cls: type[Contender], settings: Sequence[Setting], file: Path, patience: float) -> str | None:
    """Why ranks failed, if they did; what came of the cases before is in `file`."""
    try:
        world.run(try_all, cls, settings, file, timeout=patience)
    except RankFailed as failure:
        return str(failure)
    return None


def _explained(failure: str) -> tuple[str, dict[str, tuple[float, float]], str]:
    """From what a world says of its ranks to an outcome. A rank that raised has refused, whatever others wait for."""
    died = re.search(r"^rank \d+ died.*$", failure, re.MULTILINE)
    if died is None and "raised:" in failure:
        return "refused", {}, in_a_line(failure)
    return ("crashed", {}, died[0]) if died else ("hung", {}, failure.splitlines()[1])


def try_all(cls: type[Contender], settings: Sequence[Setting], file: Path) -> None:
    """What one rank does: each setting, until one raises. Rank 0 writes down what came of it."""
    torch.set_num_threads(1)
    for setting in settings:
        outcome = judged(cls, setting)
        if dist.get_rank() == 0:
            with file.open("a") as lines:
                lines.write(json.dumps(asdict(outcome)) + "\n")


def judged(cls: type[Contender], setting: Setting) -> Outcome:
    """Whether it is right. Raises whatever the contender raises."""
    case = setting.case(cls.batch, cls.forward_only)
    try:
        off = errors(cls(setting).method(), case)
    except AssertionError as complaint:  # the suite's own names the case; any other is the contender's
        if not str(complaint).startswith(f"{case}: "):
            raise
        return Outcome(str(setting), "wrong", {}, str(complaint).removeprefix(f"{case}: "))
    measured = {name: (float(f"{each.error:.3g}"), float(f"{each.limit:.3g}")) for name, each in off.items()}
    return Outcome(str(setting), verdict(list(off.values())), measured)


def verdict(off: Sequence[Off]) -> str:
    """Of all tensors: right, rough or wrong."""
    if all(each.fraction <= 1 for each in off):
        return "right"
    tolerant = all(each.error <= ROUGH * max(each.limit, LIMITS[torch.float32]) for each in off)
    return "rough" if tolerant else "wrong"
