"""Measures candidate after candidate, and the fastest again in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from armillary.core.health.ranks import Ranks, check_consistent
from armillary.core.health.watchdog import about_others
from armillary.core.mesh import world_size
from armillary.plan import train_config
from armillary.plan.search.candidates import Candidate
from armillary.plan.tune import bench
from armillary.plan.tune.bench import Timing
from armillary.plan.tune.cache_key import Question, difference, dtype_name, question_of
from armillary.plan.tune.command import Order
from armillary.plan.tune.groups import Groups
from armillary.plan.tune.measurements import Measured, Tuned, read, write
from armillary.plan.tune.prune import all_candidates, pruned
from armillary.plan.tune.screen import TunerScreen
from armillary.train.build import precision
from armillary.train.config import Config
from armillary.train.config.overlay import by_flag

NEAR = 1.05
"""As fast as the fastest are those that take at most so many times as long: once measured, noise may have chosen."""
FINALISTS = 3
ATTEMPTS = 2
"""Times that a candidate is begun. What ends a run again and again, such as by taking all memory of the host, is not
measured for ever."""


class Measure(Protocol):
    """`bench.measure`, or a stand-in."""

    def __call__(self, config: Config, candidate: Candidate, device: torch.device, iterations: int) -> Timing: ...


class Compare(Protocol):
    """`bench.compare`, or a stand-in."""

    def __call__(
        self, config: Config, candidates: Sequence[Candidate], device: torch.device, rounds: int
    ) -> list[float]: ...


def tune(order: Order, measure: Measure = bench.measure, compare: Compare = bench.compare) -> Tuned:
    """Measures what is not measured yet, chooses, and writes the file. Every rank must call it; all get the same.

    Raises:
        ValueError: what is asked for cannot be measured, the file is that of another question, or nothing could be run.
    """
    with Groups.watched(order.measured_run) as groups:
        tuner, tuned = Tuner.start(order, groups, measure, compare)
        with tuner.screen:
            return tuner.run(tuned)


@dataclass(frozen=True)
class Tuner:
    """What does not change on the way. What is known so far goes through its methods, the same on all ranks."""

    order: Order
    groups: Groups
    candidates: Sequence[Candidate]
    screen: TunerScreen
    measure: Measure
    compare: Compare

    @classmethod
    def start(cls, order: Order, groups: Groups, measure: Measure, compare: Compare) -> tuple[Tuner, Tuned]:
        """The tuner, and what rank 0 finds in the file."""
        config = order.measured_run
        with groups.group("starting") as (device, ranks):
            check_consistent("the configuration", by_flag(config) | options(order))
            dtype = precision(config, device)
            candidates, tuned = ranks.on_first(lambda: opened(order, dtype))
        return cls(order, groups, candidates, TunerScreen(ranks.rank), measure, compare), tuned

    def run(self, tuned: Tuned) -> Tuned:
        """Measures what is left, and chooses."""
        self.screen.begins(len(self.candidates) - tuned.left, len(self.candidates), len(tuned.left_out))
        for number, candidate in enumerate(self.candidates, start=1):
            if not tuned.known(candidate):
                tuned = self.look_at(candidate, number, tuned)
        if not tuned.complete:
            tuned = self.choose(tuned)
        if tuned.choice is None:
            raise ValueError(f"none of {len(tuned.measured)} candidates could be run, such as {failed(tuned)}")
        self.screen.say(f"chosen: {tuned.choice}; train with --config {self.order.out}")
        return tuned

    def look_at(self, candidate: Candidate, number: int, tuned: Tuned) -> Tuned:
        """Measures a candidate, and keeps what came of it."""
        name = str(candidate)
        begun = tuned.attempts.get(name, 0)
        with self.groups.group("measuring", number) as (device, ranks):
            if begun < ATTEMPTS:
                self.keep(ranks, replace(tuned, attempts=tuned.attempts | {name: begun + 1}))
                result = self.tried(candidate, device, ranks)
            else:
                result = Measured(candidate, reason=f"has ended {begun} runs; take it out of the file to try it again")
            rest = {each: count for each, count in tuned.attempts.items() if each != name}
            tuned = replace(tuned, measured=(*tuned.measured, result), attempts=rest)
            tuned = counted(tuned, self.candidates)
            self.keep(ranks, tuned)
        self.screen.measured(number, len(self.candidates), result, tuned)
        return tuned

    def tried(self, candidate: Candidate, device: torch.device, ranks: Ranks) -> Measured:
        """Its seconds, or why there are none."""
        order = self.order
        timing, reason = attempt(lambda: self.measure(order.measured_run, candidate, device, order.iterations), ranks)
        if timing is None:
            return Measured(candidate, reason=reason)
        return Measured(candidate, timing.seconds, timing.least, memory=timing.memory)

    def choose(self, tuned: Tuned) -> Tuned:
        """The fastest; where others are about as fast, after all these were measured again in turns."""
        tuned = replace(tuned, measured=tuple(replace(each, again=None) for each in tuned.measured))
        near = [each for each in tuned.fastest if within(each, tuned.fastest[0])][:FINALISTS]
        with self.groups.group("comparing") as (device, ranks):
            if len(near) > 1:
                tuned = replace(tuned, measured=self.compared(near, tuned, device, ranks))
            best = min(tuned.fastest, key=by_speed, default=None)
            tuned = replace(tuned, complete=True, choice=None if best is None else best.candidate)
            self.keep(ranks, tuned)
        return tuned

    def compared(
        self, near: Sequence[Measured], tuned: Tuned, device: torch.device, ranks: Ranks
    ) -> tuple[Measured, ...]:
        """All measurements, with those of the nearest in turns; as they were where these cannot be run together."""
        self.screen.compares(len(near))
        wanted, rounds = [each.candidate for each in near], 2 * self.order.iterations
        again, reason = attempt(lambda: self.compare(self.order.measured_run, wanted, device, rounds), ranks)
        if again is None:
            self.screen.say(f"not compared: {reason}")
            return tuned.measured
        times = dict(zip(wanted, again, strict=True))
        return tuple(replace(each, again=times.get(each.candidate)) for each in tuned.measured)

    def keep(self, ranks: Ranks, tuned: Tuned) -> None:
        """Writes the files, on rank 0."""
        ranks.on_first(lambda: write_files(self.order, tuned))


R = TypeVar("R")


def attempt(action: Callable[[], R], ranks: Ranks) -> tuple[R | None, str | None]:
    """(what all ranks did, None), or (None, why one of them could not).

    Raises:
        RuntimeError: another rank is gone, or does not come.
    """
    result, reason = None, None
    try:
        result = action()
    except (ValueError, RuntimeError) as error:
        if about_others(error) and not isinstance(error, torch.OutOfMemoryError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    # Only here is what failed let go of, with the tensors of its frames.
    reasons = list(dict.fromkeys(each for each in ranks.agree(lambda: reason) if each is not None))
    return (None, "; ".join(reasons)) if reasons else (result, None)


def opened(order: Order, dtype: torch.dtype) -> tuple[list[Candidate], Tuned]:
    """(candidates to measure, what is known of them), by the files that this rank sees.

    Raises:
        ValueError: as `all_candidates`, `pruned` and `found`.
    """
    ranks = world_size()
    tuned = found(order.measurements, question_of(order.measured_run, ranks, dtype_name(dtype)))
    wanted, left_out = pruned(order, ranks, dtype, all_candidates(order, ranks))
    tuned = replace(tuned, left_out=tuple(each for each in left_out if not tuned.known(each.candidate)))
    tuned = counted(tuned, wanted)
    if tuned.choice is not None:
        write_files(order, tuned)  # the choice may have been removed
    return wanted, tuned


def write_files(order: Order, tuned: Tuned) -> None:
    """Writes what is known, and once there is a choice the run with it.

    Raises:
        ValueError: a file cannot be written.
    """
    write(order.measurements, tuned)
    if tuned.choice is not None:
        chosen = replace(order.run, parallel=replace(order.run.parallel, **tuned.choice.parallel))
        about = f"{tuned.choice}, measured by armillary-tune to be fastest on {tuned.question['ranks']} ranks"
        train_config.write(order.out, order.recipe or "debug", chosen, about)


def found(path: Path, question: Question) -> Tuned:
    """What the file holds; nothing, where there is none.

    Raises:
        ValueError: it cannot be read, or answers another question.
    """
    if not path.exists():
        return Tuned(question)
    tuned = read(path, f"--out {path}")
    if (other := difference(tuned.question, question)) is not None:
        raise ValueError(f"--out {path}: was measured with {other}; name another file, or remove this one")
    return tuned


def counted(tuned: Tuned, candidates: Sequence[Candidate]) -> Tuned:
    """With the number of candidates that are left; while there are any, nothing is chosen."""
    left = sum(not tuned.known(candidate) for candidate in candidates)
    return replace(tuned, left=left) if left == 0 else replace(tuned, left=left, complete=False, choice=None)


def within(measured: Measured, best: Measured) -> bool:
    """Whether it is about as fast as the fastest, in one of its passes at least."""
    return (measured.least or 0.0) <= NEAR * (best.seconds or 0.0)


def by_speed(measured: Measured) -> tuple[bool, float]:
    """Those that were measured in turns come first."""
    return measured.again is None, measured.again or measured.seconds or 0.0


def failed(tuned: Tuned) -> str:
    """One that could not be run, and why."""
    return f"{tuned.measured[0].candidate}: {tuned.measured[0].reason}"


def options(order: Order) -> dict[str, Any]:
    """What is asked for beside the configuration, but for paths."""
    names = ("iterations", "attention", "cluster", "slower")
    return {f"--{name}": getattr(order, name) for name in names}
