"""Output of `armillary-plan memory`: a table, or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from armillary.data.console import Column, gib, print_lines, print_table, short
from armillary.plan.memory import StepMemory
from armillary.plan.memory.advice import advice, policy_text
from armillary.plan.memory.plan import MemoryResult
from armillary.plan.memory.room import Room
from armillary.plan.presets import model_size

COLUMNS = (Column("one rank", text=True), Column("device (GiB)"), Column("host (GiB)"))


def as_dict(result: MemoryResult) -> dict[str, Any]:
    """Returns all figures as JSON values. Sizes are in bytes, except for "plan", the options as they were given."""
    fields: dict[str, Any] = {
        "plan": asdict(result.options),
        "model": asdict(result.model),
        "parameters": result.model.parameters(),
        "cluster": asdict(result.cluster),
        "axes": result.axes,
        "room": asdict(result.room),
        "tokens": result.length,
        "memory": asdict(result.memory),
        "estimate": asdict(result.estimate),
        "fits": result.fits,
    }
    if not result.fits:
        fields["advice"] = advice(result.job, result.cluster, result.room)
    # With --max-context: the memory that limits the length, and what a million tokens more would need.
    if result.fit is not None:
        fields["limit"] = result.room.limit(result.fit.longer)
        fields["longer"] = {"tokens": result.fit.longer_length, "memory": asdict(result.fit.longer)}
    return fields


def show(result: MemoryResult) -> None:
    """Prints the peak memory by category, and whether the sequence fits."""
    options, ranks = result.options, result.axes["ring"] * result.axes["ulysses"]
    axes = " x ".join(f"{name} {size}" for name, size in result.axes.items() if size > 1) or "1 rank"
    optimizer = "host" if options.on_host else "device"
    print_lines(f"{options.model}, {model_size(result.model)}, on {result.cluster.name}")
    checkpoints = policy_text(options.checkpointing)
    print(f"{options.attention} ({axes}), checkpoints: {checkpoints}, optimizer: on the {optimizer}")
    print(f"a sequence of {result.length:,} tokens, {short(result.length // ranks)} on a rank\n")
    print_table(COLUMNS, memory_rows(result.memory, result.room))
    print("", *verdict(result), sep="\n")


def memory_rows(memory: StepMemory, room: Room) -> Iterator[list[str]]:
    """Yields the table's rows: GiB by category at the peak of device and of host, then the two peaks and the room."""
    device, host = memory.device_breakdown, memory.host_breakdown
    # Sort by bytes on the device. Bytes on the host have a small weight, which orders categories that are only there.
    for name in sorted({**device, **host}, key=lambda name: -device.get(name, 0) - host.get(name, 0) / 1e6):
        yield [name, *(gib(sizes[name]) if sizes.get(name) else "" for sizes in (device, host))]
    yield []
    yield ["peak", gib(memory.device), gib(memory.host)]
    yield ["room", gib(room.device), gib(room.host)]


def verdict(result: MemoryResult) -> Iterator[str]:
    """Yields whether the sequence fits, the estimate by formulas, and the time of the simulation.

    With --max-context, instead of whether it fits: which memory limits the length, and how much a million tokens more
    would need.
    """
    room, memory = result.room, result.memory
    if result.fit is not None:
        longer = result.fit.longer
        device, host = (spare_text(*pair) for pair in ((longer.device, room.device), (longer.host, room.host)))
        yield f"the longest that fits; the limit is the {room.limit(longer)}'s memory"
        yield f"{short(result.fit.longer_length)} would need {device} on the device and {host} on the host"
    else:
        yield f"{'fits' if result.fits else 'does not fit'}: {fullness(room, memory)}"
        if not result.fits:
            yield advice(result.job, result.cluster, room)
    device, host = gib(result.estimate.device), gib(result.estimate.host)
    yield f"by closed formulas: {device} GiB on the device, {host} GiB on the host"
    yield f"(simulated in {memory.seconds:.0f} s, {memory.ops:,} operations; the peak is during {memory.label})"


def fullness(room: Room, memory: StepMemory) -> str:
    """Describes the fuller memory, such as "the host's memory is 88% full"."""
    return f"the {room.limit(memory)}'s memory is {room.share(memory):.0%} full"


def spare_text(need: int, size: int) -> str:
    """Describes `need` bytes beside an available `size`, such as "70.10 GiB (4.00 to spare)"."""
    return f"{gib(need)} GiB ({gib(abs(need - size))} {'missing' if need > size else 'to spare'})"
