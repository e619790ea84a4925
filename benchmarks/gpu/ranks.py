"""Four ranks on one GPU: every attention method against the float64 oracle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

from armillary.attention.conformance import METHODS, Trial, cases, compositions
from armillary.attention.conformance.run import run
from armillary.core.testing import World
from armillary.core.testing.staged import STAGED
from gpu.check import Check, Row, Setting

RANKS = 4
SECONDS = 480
"""After which no further case is begun."""


def check_conformance(setting: Setting) -> Iterator[Row]:
    """In rounds of one case of each method on each of its meshes, as many as there is time for."""
    every = compositions(list(METHODS), [RANKS])
    tried, failed, end = 0, list[str](), time.monotonic() + SECONDS
    with World(RANKS, backend=STAGED) as world:
        for trials in islice(rounds(every), setting.size(10, 1)):
            for trial, verdict in run(world, trials[: setting.size(None, 4)], setting.device.type):
                tried += 1
                failed += [f"{trial.composition}: {trial.case}: {verdict.failure}"] * bool(verdict.failure)
            if time.monotonic() > end:
                break
    for failure in failed[:20]:
        yield Row(failure, "wrong", passed=False)
    limits = "armillary.attention.conformance.limits"
    yield Row(f"failed of {tried} cases of {len(every)} methods and meshes", len(failed), "", "0", limits, not failed)


def rounds(every: list) -> Iterator[list[Trial]]:
    """A case of each, other ones each time."""
    for number in range(1000):
        several = [cases(brief=i + number * len(every)) for i in range(len(every))]
        yield [Trial(one, some[number % len(some)]) for one, some in zip(every, several, strict=True)]


CHECKS = (Check("conformance", "Every method with four ranks on one GPU, against float64", check_conformance),)
