"""Showing a prediction: tables for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.table import Table

from armillary.core.quantity import gib
from armillary.plan.dry_run.predict import Prediction
from armillary.plan.search.search import duration
from armillary.train.dry_run import report


def as_json(found: Prediction) -> str:
    """All of it."""
    return json.dumps(asdict(found) | {"fits": found.fits, "mfu": found.mfu}, indent=2)


def show(found: Prediction) -> None:
    """What the trainer's dry run shows, and memory and time."""
    tables = [] if found.memory is None else [memory_table(found)]
    report.show([*report.parts(found.run, f", on {found.cluster.name}"), *tables, *verdict(found)])


def memory_table(found: Prediction) -> Table:
    """GiB at the peak of the device's memory and at that of the host's."""
    memory, table = found.memory, report.plain_table("GiB of one rank", "device", "host")
    assert memory is not None
    device, host = memory.device_breakdown, memory.host_breakdown
    for name in sorted({**device, **host}, key=lambda name: -device.get(name, 0)):
        table.add_row(name, *(gib(sizes[name]) if sizes.get(name) else "" for sizes in (device, host)))
    table.add_section()
    table.add_row("peak", gib(memory.device), gib(memory.host))
    table.add_row("room", gib(found.room.device), gib(found.room.host))
    return table


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
