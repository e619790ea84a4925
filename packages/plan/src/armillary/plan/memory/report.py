"""Showing what was planned: a table for people, JSON for machines."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from armillary.core.quantity import gib, short
from armillary.plan.memory.plan import Planned


def as_json(planned: Planned) -> str:
    """All of it, bytes as numbers."""
    fields: dict[str, Any] = {
        "plan": asdict(planned.plan),
        "model": asdict(planned.model),
        "parameters": planned.model.parameters(),
        "cluster": asdict(planned.cluster),
        "axes": planned.axes,
        "room": asdict(planned.room),
        "tokens": planned.length,
        "memory": asdict(planned.memory),
        "estimate": asdict(planned.estimate),
        "fits": planned.room.share(planned.memory) <= 1,
    }
    if planned.fit is not None:
        fields["limit"] = planned.room.limit(planned.fit.longer)
        fields["longer"] = {"tokens": planned.fit.longer_length, "memory": asdict(planned.fit.longer)}
    return json.dumps(fields, indent=2)


def show(planned: Planned, console: Console) -> None:
    """A table of what is held at the peaks, and in a sentence whether it fits or what is the limit."""
    for line in heading(planned):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(table(planned))
    for line in verdict(planned):
        console.print(line, highlight=False, soft_wrap=True)


def heading(planned: Planned) -> list[str]:
    """What was simulated."""
    plan, ranks = planned.plan, planned.axes["ring"] * planned.axes["ulysses"]
    axes = " x ".join(f"{name} {size}" for name, size in planned.axes.items() if size > 1) or "1 rank"
    keeps = plan.checkpointing.policy + (" on the host" if plan.checkpointing.offload else "")
    return [
        f"{plan.model}, {planned.model.parameters() / 1e9:.2f}B parameters, on {planned.cluster.name}",
        f"{plan.attention} ({axes}), checkpoints: {keeps}, optimizer: on the {'host' if plan.on_host else 'device'}",
        f"a sequence of {planned.length:,} tokens, {short(planned.length // ranks)} on a rank",
    ]


def table(planned: Planned) -> Table:
    """GiB by category at the peak of the device's memory and at that of the host's."""
    memory = planned.memory
    made = Table("GiB of one rank", *(["device", "host"]), box=None, header_style="bold")
    for column in made.columns[1:]:
        column.justify = "right"
    names = sorted(
        {*memory.device_breakdown, *memory.host_breakdown},
        key=lambda name: -memory.device_breakdown.get(name, 0) - memory.host_breakdown.get(name, 0) / 1e6,
    )
    for name in names:
        sizes = (memory.device_breakdown.get(name, 0), memory.host_breakdown.get(name, 0))
        made.add_row(name, *(gib(size) if size else "" for size in sizes))
    made.add_section()
    made.add_row("peak", gib(memory.device), gib(memory.host), style="bold")
    made.add_row("room", gib(planned.room.device), gib(planned.room.host))
    return made


def verdict(planned: Planned) -> list[str]:
    """Whether it fits; of the longest sequence that does, what holds the next million tokens back."""
    room, memory = planned.room, planned.memory
    device, host = gib(planned.estimate.device), gib(planned.estimate.host)
    closed = f"by closed formulas: {device} GiB on the device, {host} on the host"
    took = f"(simulated in {memory.seconds:.0f} s, {memory.ops:,} operations; most is held during {memory.label})"
    if planned.fit is None:
        fits = room.share(memory) <= 1
        return [
            f"{'fits' if fits else 'does not fit'}: {fullness(room.share(memory), room.limit(memory))}",
            closed,
            took,
        ]
    longer = planned.fit.longer
    more = short(planned.fit.longer_length)
    return [
        f"the longest that fits; full is the {room.limit(longer)}'s memory",
        f"{more} would need {lacking(longer.device, room.device)} on the device and {lacking(longer.host, room.host)} "
        f"on the host",
        closed,
        took,
    ]


def fullness(share: float, limit: str) -> str:
    return f"the {limit}'s memory is {share:.0%} full"


def lacking(need: int, have: int) -> str:
    """Bytes needed, and how many are missing or to spare."""
    word = "missing" if need > have else "to spare"
    return f"{gib(need)} GiB ({gib(abs(need - have))} {word})"
