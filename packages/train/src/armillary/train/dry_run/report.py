"""Showing a dry run: tables for people, JSON for machines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from armillary.models import GPTConfig
from armillary.train.config import Config
from armillary.train.dry_run.predict import DryRun, dry_run

PLANNER = (
    "memory and time of a step: armillary-plan run, with these flags and --cluster 8xh100 (pip install armillary-plan)"
)


def show_dry_run(config: Config, ranks: int | None, as_json: bool) -> None:
    """Prints what `dry_run` finds, on the first of torchrun's ranks.

    Raises:
        ValueError: as `dry_run`, on all of them.
    """
    found = dry_run(config, ranks)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        show([*parts(found), f"a step: {found.tokens_per_step:,} tokens, {found.flops:.3g} FLOPs", PLANNER])


def show(lines: list[str | Table]) -> None:
    """Line by line, and table by table."""
    console = Console(soft_wrap=True, highlight=False)
    for line in lines:
        console.print(line, markup=False) if isinstance(line, str) else console.print(line)


def parts(found: DryRun, where: str = "") -> Iterator[str | Table]:
    """Model and mesh, shapes of a step, and parameters.

    Args:
        where: on which machines.
    """
    family = "GPT" if isinstance(found.model, GPTConfig) else "LLaMA"
    axes = " x ".join(f"{name} {size}" for name, size in found.axes.items())
    yield f"{family}, {found.parameters:,} parameters, {found.precision}{where}"
    yield f"mesh: {axes} = {found.ranks} {'rank' if found.ranks == 1 else 'ranks'}"
    yield step_shapes(found)
    yield parameter_shapes(found)


def step_shapes(found: DryRun) -> Table:
    table = plain_table("of one rank", "shape")
    for name, shape in found.shapes.items():
        table.add_row(name, shown(shape))
    return table


def parameter_shapes(found: DryRun) -> Table:
    table = plain_table("largest parameters", "count", "whole", "on a rank")
    for parameter in found.largest:
        table.add_row(parameter.name, str(parameter.count), shown(parameter.shape), shown(parameter.local))
    table.add_row("all", "", f"{found.parameters:,}", f"{found.local_parameters:,}")
    return table


def plain_table(name: str, *columns: str) -> Table:
    """Numbers stand to the right."""
    table = Table(name, box=None, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def shown(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)
