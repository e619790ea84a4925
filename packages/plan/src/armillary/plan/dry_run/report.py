"""Showing a prediction: tables for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from armillary.core.table import print_table
from armillary.plan.dry_run.predict import Prediction
from armillary.plan.memory.report import HEADS, rows
from armillary.plan.search.search import duration
from armillary.train.dry_run import report


def as_json(found: Prediction) -> str:
    """All of it."""
    return json.dumps(asdict(found) | {"fits": found.fits, "mfu": found.mfu}, indent=2)


def show(found: Prediction) -> None:
    """What the trainer's dry run shows, and memory and time."""
    report.show(found.run, f", on {found.cluster.name}")
    if found.memory is not None:
        print_table(HEADS, rows(found.memory, found.room))
        print()
    print(*verdict(found), sep="\n")


def verdict(found: Prediction) -> Iterator[str]:
    """Whether it fits, and how long a step takes."""
    if found.memory is None:
        yield "memory: not simulated under tensor parallelism"
    else:
        full = f"the {found.room.limit(found.memory)}'s memory is {found.room.share(found.memory):.0%} full"
        yield f"memory: {'fits' if found.fits else 'does not fit'}, by simulation: {full}"
        if found.bound:
            yield "that is a bound: with --checkpointing.policy none, CUDA's kernels keep less than the simulated ones"
    work = f"{found.run.tokens_per_step:,} tokens, {found.run.flops:.3g} FLOPs"
    if found.time is None:
        yield f"a step: {work}; its time is not predicted with replicas or under tensor parallelism"
        return
    yield f"a step: {work}, {duration(found.time.seconds)} by its communication plan, an MFU of {found.mfu:.1%}"
    if found.time.seconds > found.limit:
        yield f"that is longer than the {duration(found.limit)} of --train.timeout-minutes, after which a run ends"
