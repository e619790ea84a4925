"""`tune`: measures all candidates one after another, then the fastest ones again, alternating between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from armillary.core import world_size
from armillary.plan.search.candidates import Candidate
from armillary.plan.train_config import write_toml
from armillary.plan.tune import bench
from armillary.plan.tune.command import TuneOptions
from armillary.plan.tune.groups import Groups
from armillary.plan.tune.measurements import Measurement, TunerState, cache_key, load, save
from armillary.plan.tune.prune import all_candidates, prune
from armillary.plan.tune.screen import TunerScreen
from armillary.train import Config
from armillary.train.config import by_flag
from armillary.train.parts import Ranks, caused_by_peers, check_consistent, precision

NOISE = 1.05
"""Candidates within this factor of the fastest are compared again, because the difference may be noise."""
FINALISTS = 3
"""Maximum number of candidates that are compared again."""
ATTEMPTS = 2
"""Maximum number of starts of a candidate. A candidate that kills the tuner each time is then skipped.

Exhausting the host's memory kills the tuner, for example.
"""

Measure = Callable[[Config, Candidate, torch.device, int], Measurement]
"""Type of `bench.measure`."""
Compare = Callable[[Config, Sequence[Candidate], torch.device, int], list[float]]
"""Type of `bench.compare`."""


def tune(options: TuneOptions, measure: Measure = bench.measure, compare: Compare = bench.compare) -> TunerState:
    """Measures the remaining candidates, chooses the fastest and writes the files.

    Every rank must call it; all return the same state.

    Raises:
        ValueError: there are no candidates, the file has measurements with other settings, or no candidate runs.
    """
    with Groups.open(options.measured_run) as groups:
        tuner, state = Tuner.start(options, groups, measure, compare)
        with tuner.screen:
            return tuner.run(state)


@dataclass(frozen=True)
class Tuner:
    """A tuning run. Its fields do not change; methods take and return a `TunerState`, which is equal on all ranks."""

    options: TuneOptions
    groups: Groups
    candidates: Sequence[Candidate]
    screen: TunerScreen
    measure: Measure
    compare: Compare

    @classmethod
    def start(
        cls, options: TuneOptions, groups: Groups, measure: Measure, compare: Compare
    ) -> tuple[Tuner, TunerState]:
        """Returns the tuner, and the state of an earlier run, if any, which rank 0 reads for all ranks."""
        config = options.measured_run
        tuner_flags = {f"--{name}": getattr(options, name) for name in ("iterations", "attention", "cluster", "slower")}
        with groups.group("starting") as (device, ranks):
            check_consistent("the configuration", by_flag(config) | tuner_flags)
            dtype = precision(config, device)
            candidates, state = ranks.on_first(lambda: load_state(options, dtype))
        return cls(options, groups, candidates, TunerScreen(ranks.rank), measure, compare), state

    def run(self, state: TunerState) -> TunerState:
        """Measures the remaining candidates, and chooses the fastest."""
        self.screen.show_start(len(self.candidates), state)
        for number, candidate in enumerate(self.candidates, start=1):
            if not state.has(candidate):
                state = self.measure_candidate(candidate, number, state)
        if not state.complete:
            state = self.choose(state)
        if state.choice is None:
            failed_measurement = state.measurements[0]
            raise ValueError(
                f"none of {len(state.measurements)} candidates could be run; the first, "
                f"{failed_measurement.candidate}: {failed_measurement.reason}"
            )
        self.screen.print(f"chosen: {state.choice}; train with --config {self.options.out}")
        return state

    def measure_candidate(self, candidate: Candidate, number: int, state: TunerState) -> TunerState:
        """Measures a candidate, and saves its measurement or the reason of its failure."""
        options, name = self.options, str(candidate)
        starts = state.attempts.get(name, 0)
        with self.groups.group("measuring", number) as (device, ranks):
            if starts < ATTEMPTS:
                # Count the start before the measurement, because the measurement may kill the tuner.
                self.save(ranks, replace(state, attempts=state.attempts | {name: starts + 1}))
                measurement, reason = attempt(
                    lambda: self.measure(options.measured_run, candidate, device, options.iterations), ranks
                )
            else:
                reason = f"has killed the tuner {starts} times; to try again, remove it from {options.measurements}"
                measurement = None
            measurement = measurement or Measurement(candidate, reason=reason)
            # The candidate has a result now, so the number of its starts is no longer needed.
            attempts = {other: count for other, count in state.attempts.items() if other != name}
            state = replace(state, measurements=(*state.measurements, measurement), attempts=attempts)
            state = with_remaining(state, self.candidates)
            self.save(ranks, state)
        self.screen.show_measurement(number, len(self.candidates), measurement, state)
        return state

    def choose(self, state: TunerState) -> TunerState:
        """Chooses the fastest candidate. If others are almost as fast (`NOISE`), compares them first."""
        # 1. The finalists are the candidates whose fastest pass is within `NOISE` of the smallest median. Drop the
        # comparison of an earlier run, which may have had other finalists.
        state = replace(
            state, measurements=tuple(replace(measurement, paired_seconds=None) for measurement in state.measurements)
        )
        fastest = state.fastest_first
        finalists = [
            measurement
            for measurement in fastest
            if (measurement.fastest_pass or 0.0) <= NOISE * (fastest[0].seconds or 0.0)
        ]
        with self.groups.group("comparing") as (device, ranks):
            # 2. Measure the finalists again, alternating between them.
            if len(finalists) > 1:
                state = self.compare_finalists(finalists[:FINALISTS], state, device, ranks)

            # 3. Choose the fastest of the comparison or, without a comparison, the fastest of all.
            def order(measurement: Measurement) -> tuple[bool, float]:
                return measurement.paired_seconds is None, measurement.paired_seconds or measurement.seconds or 0.0

            best = min(state.fastest_first, key=order, default=None)
            state = replace(state, complete=True, choice=None if best is None else best.candidate)
            self.save(ranks, state)
        return state

    def compare_finalists(
        self, finalists: Sequence[Measurement], state: TunerState, device: torch.device, ranks: Ranks
    ) -> TunerState:
        """Adds `paired_seconds` to the finalists. Returns the state unchanged if the finalists do not run together."""
        self.screen.show_finalists(len(finalists))
        candidates, rounds = [finalist.candidate for finalist in finalists], 2 * self.options.iterations
        seconds, reason = attempt(lambda: self.compare(self.options.measured_run, candidates, device, rounds), ranks)
        if seconds is None:
            self.screen.print(f"not compared: {reason}")
            return state
        seconds_by_candidate = dict(zip(candidates, seconds, strict=True))
        return replace(
            state,
            measurements=tuple(
                replace(measurement, paired_seconds=seconds_by_candidate.get(measurement.candidate))
                for measurement in state.measurements
            ),
        )

    def save(self, ranks: Ranks, state: TunerState) -> None:
        """Writes the files on rank 0, while the other ranks wait."""
        ranks.on_first(lambda: write_files(self.options, state))


R = TypeVar("R")


def attempt(action: Callable[[], R], ranks: Ranks) -> tuple[R | None, str | None]:
    """Runs an action. Returns (result, None) if it succeeds on all ranks, else (None, the reasons of the failures).

    Raises:
        RuntimeError: another rank has died or does not respond.
    """
    result, reason = None, None
    try:
        result = action()
    except (ValueError, RuntimeError) as error:
        # A lost connection is another rank's failure and ends the run; an out-of-memory error only fails the candidate.
        if caused_by_peers(error) and not isinstance(error, torch.OutOfMemoryError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    # Exchange reasons outside of the `except` block: inside, the error's frames keep the candidate's tensors alive.
    reasons = list(dict.fromkeys(text for text in ranks.on_all(lambda: reason) if text is not None))
    return (None, "; ".join(reasons)) if reasons else (result, None)


def load_state(options: TuneOptions, dtype: torch.dtype) -> tuple[list[Candidate], TunerState]:
    """Returns (candidates to measure, state of an earlier run or an empty one). Reads this rank's files.

    Raises:
        ValueError: as `all_candidates`, `prune` and `load`.
    """
    ranks = world_size()
    state = load(options.measurements, cache_key(options.measured_run, ranks, dtype))
    candidates, excluded = prune(options, ranks, dtype, all_candidates(options, ranks))
    # An earlier run may have measured candidates that this one excludes. They keep their measurements.
    excluded = tuple(measurement for measurement in excluded if not state.has(measurement.candidate))
    state = with_remaining(replace(state, excluded=excluded), candidates)
    if state.choice is not None:
        write_files(options, state)  # writes the TOML file again if it was removed
    return candidates, state


def write_files(options: TuneOptions, state: TunerState) -> None:
    """Writes the measurements. If a candidate is chosen, also writes the configuration of the run that uses it.

    Raises:
        ValueError: a file cannot be written.
    """
    save(options.measurements, state)
    if state.choice is not None:
        run = state.choice.apply_to(options.run)
        comment = f"{state.choice}, measured by armillary-tune to be fastest on {state.settings['ranks']} ranks"
        write_toml(options.out, options.recipe or "debug", run, comment)


def with_remaining(state: TunerState, candidates: Sequence[Candidate]) -> TunerState:
    """Updates the number of remaining candidates. If any remain, removes the choice."""
    remaining = sum(not state.has(candidate) for candidate in candidates)
    if remaining:
        return replace(state, remaining=remaining, complete=False, choice=None)
    return replace(state, remaining=0)
