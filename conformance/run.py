"""Runs cases on a world of ranks, of which each case may use some."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from armillary.core.testing import RankFailed, World
from conformance.check import attend_nothing, errors
from conformance.draw import Trial

CHUNK = 30
"""Number of trials in one call to a world. If a rank raises or hangs, all trials of the call are repeated."""


class Verdict(NamedTuple):
    """Result of a trial: the tensor whose error is closest to its limit, and the failure, "" if there is none.

    `fraction` is the error of that tensor divided by its limit.
    """

    fraction: float
    tensor: str
    failure: str


def run(world: World, trials: Sequence[Trial], device: str = "cpu") -> Iterator[tuple[Trial, Verdict]]:
    """Yields each trial with its verdict. If a rank raises or hangs, the trials are repeated one by one.

    Args:
        device: device type of tensors: "cuda" in a "staged" world.
    """
    for start in range(0, len(trials), CHUNK):
        chunk = trials[start : start + CHUNK]
        try:
            yield from zip(chunk, world.run(judge, chunk, device, timeout=300)[-1], strict=True)
        except RankFailed:
            for trial in chunk:
                try:
                    yield trial, world.run(judge, [trial], device, timeout=120)[-1][0]
                except RankFailed as failure:
                    yield trial, Verdict(float("inf"), "none", error_line_of(str(failure)))


def error_line_of(failure: str) -> str:
    """Returns the error that a rank raised, in one line; if no rank raised, the first line about a rank."""
    raised = re.search(r"^rank \d+ raised:\n(?s:.*?)^(\w[\w.]*(?:Error|Exception)\b.*)$", failure, re.MULTILINE)
    return raised[1] if raised else " ".join(failure.splitlines()[1:2])


def judge(chunk: Sequence[Trial], device: str = "cpu") -> list[Verdict]:
    """Returns this rank's verdict on each trial: the same on all ranks that take part in the trial."""
    torch.set_num_threads(1)
    return [_judge_trial(trial, device) for trial in chunk]


def _judge_trial(trial: Trial, device: str) -> Verdict:
    composition, case = trial.composition, trial.case
    # A mesh of a smaller composition has the last ranks of the world.
    if dist.get_rank() < dist.get_world_size() - composition.ranks:
        attend_nothing()
        return Verdict(0.0, "none", "")
    if case.compiled:
        torch.compiler.reset()
    try:
        tensor_errors = errors(
            composition.build(device), case, device=device, dtensor_mesh=composition.dtensor_mesh(device)
        )
    except AssertionError as failure:
        return Verdict(float("inf"), "none", str(failure))
    tensor = max(tensor_errors, key=lambda name: tensor_errors[name].fraction)
    wrong = [
        f"{name} off by {x.error:.2g} (limit {x.limit:.2g})" for name, x in tensor_errors.items() if x.fraction > 1
    ]
    return Verdict(tensor_errors[tensor].fraction, tensor, ", ".join(wrong))
