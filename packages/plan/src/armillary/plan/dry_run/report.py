"""Showing a prediction: tables for people, JSON for machines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from math import prod

from rich.console import Console
from rich.table import Table

from armillary.core.quantity import gib
from armillary.models import GPTConfig
from armillary.plan.dry_run.predict import Prediction, predict
from armillary.train.config import Config


def show_dry_run(config: Config, ranks: int | None, cluster: str | None, mfu: float, as_json: bool) -> None:
    """Prints what `predict` says, on the first of torchrun's ranks.

    Raises:
        ValueError: as `predict`, on all of them.
    """
    prediction = predict(config, ranks, cluster, mfu)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print(json.dumps(asdict(prediction) | {"fits": prediction.fits}, indent=2))
        return
    console = Console(soft_wrap=True, highlight=False)
    for part in parts(prediction):
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)


def parts(found: Prediction) -> Iterator[str | Table]:
    """Line by line, and table by table."""
    family = "GPT" if isinstance(found.model, GPTConfig) else "LLaMA"
    where = "" if found.cluster is None else f", on {found.cluster.name}"
    axes = " x ".join(f"{name} {size}" for name, size in found.axes.items())
    yield f"{family}, {found.parameters:,} parameters, {found.precision}{where}"
    yield f"mesh: {axes} = {prod(found.axes.values())} {'rank' if prod(found.axes.values()) == 1 else 'ranks'}"
    yield step_shapes(found)
    yield parameter_shapes(found)
    if found.memory is not None:
        yield memory_table(found)
    yield from verdict(found)


def step_shapes(found: Prediction) -> Table:
    table = plain_table("of one rank", "shape")
    for name, shape in found.shapes.items():
        table.add_row(name, shown(shape))
    return table


def parameter_shapes(found: Prediction) -> Table:
    table = plain_table("largest parameters", "count", "whole", "on a rank")
    for parameter in found.largest:
        table.add_row(parameter.name, str(parameter.count), shown(parameter.shape), shown(parameter.local))
    table.add_row("all", "", f"{found.parameters:,}", f"{found.local_parameters:,}")
    return table


def memory_table(found: Prediction) -> Table:
    """GiB at the peak of the device's memory and at that of the host's."""
    memory, table = found.memory, plain_table("GiB of one rank", "device", "host")
    assert memory is not None
    device, host = memory.device_breakdown, memory.host_breakdown
    for name in {**device, **host}:
        table.add_row(name, *(gib(sizes[name]) if name in sizes else "" for sizes in (device, host)))
    table.add_section()
    table.add_row("peak", gib(memory.device), gib(memory.host))
    if found.room is not None:
        table.add_row("room", gib(found.room.device), gib(found.room.host))
    return table


def verdict(found: Prediction) -> Iterator[str]:
    """Whether it fits, and how long a step takes."""
    if found.memory is None:
        yield "memory: not predicted under tensor parallelism"
    elif found.room is None:
        yield "memory: by closed formulas; name the machines by --cluster to see whether it fits"
    else:
        full = f"the {found.room.limit(found.memory)}'s memory is {found.room.share(found.memory):.0%} full"
        yield f"memory: {'fits' if found.fits else 'does not fit'}, by closed formulas: {full}"
    work = f"{found.tokens_per_step:,} tokens, {found.flops:.3g} FLOPs"
    if found.seconds is None:
        yield f"a step: {work}"
    else:
        yield f"a step: {work}, {duration(found.seconds)} at an assumed MFU of {found.mfu:.0%}"
        if found.seconds > found.limit:
            yield f"that is longer than the {duration(found.limit)} of --train.timeout-minutes, after which a run ends"


def plain_table(name: str, *columns: str) -> Table:
    """Numbers stand to the right."""
    table = Table(name, box=None, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def shown(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)


def duration(seconds: float) -> str:
    """In the unit that people would use."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
