"""`tune`: measures all candidates one after another, then compares the fastest ones by alternating between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from armillary.core import world_size
from armillary.plan.search.candidates import Candidate
from armillary.plan.train_config import write_toml
from armillary.plan.tune import bench
from armillary.plan.tune.command import TunePlan
from armillary.plan.tune.groups import Groups
from armillary.plan.tune.measurements import Measurement, TunerState, cache_key, load, save
from armillary.plan.tune.prune import all_candidates, prune
from armillary.plan.tune.screen import TunerScreen
from armillary.train.build import precision
from armillary.train.config import Config
from armillary.train.config.overlay import by_flag
from armillary.train.runtime.health.ranks import Ranks, check_consistent
from armillary.train.runtime.health.watchdog import caused_by_peers

NOISE = 1.05
"""Candidates within this factor of the fastest are compared again: the difference may be noise."""
FINALISTS = 3
ATTEMPTS = 2
"""Maximum starts of a candidate. One that kills the tuner each time, as by exhausting host memory, is then skipped."""


Measure = Callable[[Config, Candidate, torch.device, int], Measurement]
"""Type of `bench.measure`."""
Compare = Callable[[Config, Sequence[Candidate], torch.device, int], list[float]]
"""Type of `bench.compare`."""


def tune(plan: TunePlan, measure: Measure = bench.measure, compare: Compare = bench.compare) -> TunerState:
    """Measures remaining candidates, chooses and writes the files. Every rank must call it; all return the same.

    Raises:
        ValueError: the plan cannot be measured, its file has other settings, or no candidate could be run.
    """
    with Groups.open(plan.measured_run) as groups:
        tuner, state = Tuner.start(plan, groups, measure, compare)
        with tuner.screen:
            return tuner.run(state)


@dataclass(frozen=True)
class Tuner:
    """A tuning run. Fields are constant; methods take and return its state, which is equal on all ranks."""

    plan: TunePlan
    groups: Groups
    candidates: Sequence[Candidate]
    screen: TunerScreen
    measure: Measure
    compare: Compare

    @classmethod
    def start(cls, plan: TunePlan, groups: Groups, measure: Measure, compare: Compare) -> tuple[Tuner, TunerState]:
        """Returns the tuner, and the state of an earlier run, which rank 0 reads for all ranks."""
        config = plan.measured_run
        options = {f"--{name}": getattr(plan, name) for name in ("iterations", "attention", "cluster", "slower")}
        with groups.group("starting") as (device, ranks):
            check_consistent("the configuration", by_flag(config) | options)
            dtype = precision(config, device)
            candidates, state = ranks.on_first(lambda: load_state(plan, dtype))
        return cls(plan, groups, candidates, TunerScreen(ranks.rank), measure, compare), state

    def run(self, state: TunerState) -> TunerState:
        """Measures the remaining candidates, and chooses."""
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
        self.screen.print(f"chosen: {state.choice}; train with --config {self.plan.out}")
        return state

    def measure_candidate(self, candidate: Candidate, number: int, state: TunerState) -> TunerState:
        """Measures a candidate, and saves the result or the reason of its failure."""
        plan, name = self.plan, str(candidate)
        starts = state.attempts.get(name, 0)
        with self.groups.group("measuring", number) as (device, ranks):
            if starts < ATTEMPTS:
                # Saved before the measurement, so that a measurement that kills the run is counted.
                self.save(ranks, replace(state, attempts=state.attempts | {name: starts + 1}))
                measurement, reason = attempt(
                    lambda: self.measure(plan.measured_run, candidate, device, plan.iterations), ranks
                )
            else:
                measurement, reason = (
                    None,
                    f"has killed the tuner {starts} times; to try again, remove it from {plan.measurements}",
                )
            measurement = measurement or Measurement(candidate, reason=reason)
            # The candidate has a result now, so its attempts no longer count.
            attempts = {
                candidate_name: count for candidate_name, count in state.attempts.items() if candidate_name != name
            }
            state = replace(state, measurements=(*state.measurements, measurement), attempts=attempts)
            state = with_remaining(state, self.candidates)
            self.save(ranks, state)
        self.screen.show_measurement(number, len(self.candidates), measurement, state)
        return state

    def choose(self, state: TunerState) -> TunerState:
        """Chooses the fastest candidate, after a comparison if others are within `NOISE`."""
        # 1. Finalists: candidates whose fastest pass is as fast as the best median, up to noise. Comparisons of an
        # earlier run are dropped, because it may have had other finalists.
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
            # 2. Measure them in turns.
            if len(finalists) > 1:
                state = self.compare_finalists(finalists[:FINALISTS], state, device, ranks)

            # 3. Choose: compared candidates come first, in the order of the comparison.
            def order(measurement: Measurement) -> tuple[bool, float]:
                return measurement.paired_seconds is None, measurement.paired_seconds or measurement.seconds or 0.0

            best = min(state.fastest_first, key=order, default=None)
            state = replace(state, complete=True, choice=None if best is None else best.candidate)
            self.save(ranks, state)
        return state

    def compare_finalists(
        self, finalists: Sequence[Measurement], state: TunerState, device: torch.device, ranks: Ranks
    ) -> TunerState:
        """Adds the finalists' seconds in the comparison; no change if they cannot run in one process."""
        self.screen.show_finalists(len(finalists))
        candidates, rounds = [finalist.candidate for finalist in finalists], 2 * self.plan.iterations
        seconds, reason = attempt(lambda: self.compare(self.plan.measured_run, candidates, device, rounds), ranks)
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
        """Writes the files on rank 0."""
        ranks.on_first(lambda: write_files(self.plan, state))


R = TypeVar("R")


def attempt(action: Callable[[], R], ranks: Ranks) -> tuple[R | None, str | None]:
    """Returns (result, None) if the action succeeds on all ranks, else (None, the reasons).

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
    # Outside of the handler, because the error's frames would keep the failed candidate's tensors alive.
    reasons = list(dict.fromkeys(text for text in ranks.agree(lambda: reason) if text is not None))
    return (None, "; ".join(reasons)) if reasons else (result, None)


def load_state(plan: TunePlan, dtype: torch.dtype) -> tuple[list[Candidate], TunerState]:
    """Returns (candidates to measure, state of an earlier run), from the files on this rank.

    Raises:
        ValueError: as `all_candidates`, `prune` and `load`.
    """
    ranks = world_size()
    state = load(plan.measurements, cache_key(plan.measured_run, ranks, dtype))
    selected_candidates, excluded_measurements = prune(plan, ranks, dtype, all_candidates(plan, ranks))
    state = replace(
        state,
        excluded=tuple(measurement for measurement in excluded_measurements if not state.has(measurement.candidate)),
    )
    state = with_remaining(state, selected_candidates)
    if state.choice is not None:
        write_files(plan, state)  # restores the TOML file if it was removed
    return selected_candidates, state


def write_files(plan: TunePlan, state: TunerState) -> None:
    """Writes the measurements and, if a candidate is chosen, the configuration of the run with it.

    Raises:
        ValueError: a file cannot be written.
    """
    save(plan.measurements, state)
    if state.choice is not None:
        run = state.choice.apply_to(plan.run)
        comment = f"{state.choice}, measured by armillary-tune to be fastest on {state.settings['ranks']} ranks"
        write_toml(plan.out, plan.recipe or "debug", run, comment)


def with_remaining(state: TunerState, candidates: Sequence[Candidate]) -> TunerState:
    """Updates the number of remaining candidates, and clears the choice while there are any."""
    remaining_count = sum(not state.has(candidate) for candidate in candidates)
    if remaining_count:
        return replace(state, remaining=remaining_count, complete=False, choice=None)
    return replace(state, remaining=0)
