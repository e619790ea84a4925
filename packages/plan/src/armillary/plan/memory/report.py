"""Showing what was planned: a table for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from armillary.core.quantity import gib, short
from armillary.core.table import Column, print_table
from armillary.models import Checkpointing
from armillary.plan.memory import StepMemory
from armillary.plan.memory.plan import Planned
from armillary.plan.memory.room import Room


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


def show(planned: Planned) -> None:
    """A table of what is held at the peaks, and in a sentence whether it fits or what is the limit."""
    print(*heading(planned), "", sep="\n")
    print_table(HEADS, rows(planned.memory, planned.room))
    print("", *verdict(planned), sep="\n")


def heading(planned: Planned) -> list[str]:
    """What was simulated."""
    plan, ranks = planned.plan, planned.axes["ring"] * planned.axes["ulysses"]
    axes = " x ".join(f"{name} {size}" for name, size in planned.axes.items() if size > 1) or "1 rank"
    keeps, optimizer = checkpoints(plan.checkpointing), "host" if plan.on_host else "device"
    return [
        f"{plan.model}, {planned.model.parameters() / 1e9:.2f}B parameters, on {planned.cluster.name}",
        f"{plan.attention} ({axes}), checkpoints: {keeps}, optimizer: on the {optimizer}",
        f"a sequence of {planned.length:,} tokens, {short(planned.length // ranks)} on a rank",
    ]


def checkpoints(kept: Checkpointing) -> str:
    """Such as "attention output of 25 blocks and 5 inputs on the host, of 1 block on the device"."""
    outputs = "" if kept.outputs is None else f" of {blocks(kept.outputs)}"
    inputs = "" if kept.inputs is None else f" and {kept.inputs} inputs"
    here = f", of {blocks(kept.on_device)} on the device" if kept.on_device else ""
    return f"{kept.policy.replace('_', ' ')}{outputs}{inputs}{' on the host' if kept.offload else ''}{here}"


def blocks(count: int) -> str:
    """So many blocks."""
    return f"{count} block{'' if count == 1 else 's'}"


HEADS = (Column("one rank", text=True), Column("device (GiB)"), Column("host (GiB)"))


def rows(memory: StepMemory, room: Room) -> Iterator[list[str]]:
    """GiB by category at the peak of the device's memory and at that of the host's."""
    device, host = memory.device_breakdown, memory.host_breakdown
    for name in sorted({**device, **host}, key=lambda name: -device.get(name, 0) - host.get(name, 0) / 1e6):
        yield [name, *(gib(sizes[name]) if sizes.get(name) else "" for sizes in (device, host))]
    yield []
    yield ["peak", gib(memory.device), gib(memory.host)]
    yield ["room", gib(room.device), gib(room.host)]


def verdict(planned: Planned) -> list[str]:
    """Whether it fits; of the longest sequence that does, what holds the next million tokens back."""
    room, memory = planned.room, planned.memory
    device, host = gib(planned.estimate.device), gib(planned.estimate.host)
    closed = f"by closed formulas: {device} GiB on the device, {host} GiB on the host"
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
