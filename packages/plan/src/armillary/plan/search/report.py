"""Output of a search: a table, or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from math import floor, log10
from pathlib import Path
from typing import Any

from armillary.core.quantity import gib
from armillary.core.table import Column, print_table
from armillary.plan.memory.report import checkpoints
from armillary.plan.memory.room import missing
from armillary.plan.search.command_line import command_line
from armillary.plan.search.search import Choice, SearchResult


def as_json(found: SearchResult) -> str:
    """All choices, with every part of their times."""
    return json.dumps(
        {
            "plan": {name: str(x) if isinstance(x, Path) else x for name, x in asdict(found.plan).items()},
            "model": asdict(found.model),
            "cluster": asdict(found.cluster),
            "room": asdict(found.room),
            "tokens": found.length,
            "choices": [as_fields(found, choice) for choice in found.choices],
        },
        indent=2,
    )


def as_fields(found: SearchResult, choice: Choice) -> dict[str, Any]:
    """A choice, and the command that trains it."""
    attention = choice.candidate.attention
    return {
        "axes": choice.candidate.mesh.axes,
        "attention": asdict(attention),
        "checkpointing": asdict(choice.checkpointing),
        "on_host": choice.on_host,
        "fits": choice.fits,
        "seconds": choice.time.seconds,
        "parts": choice.time.parts(),
        "mfu": choice.mfu,
        "device": choice.memory.device,
        "host": choice.memory.host,
        "reason": None if choice.fits and choice is found.fitting[0] else found.reason(choice),
        "command": command_line(found, choice),
    }


def show(found: SearchResult) -> None:
    """The best, why each is slower than the first, counts of the rest, and the command that trains the first."""
    print(*heading(found), "", sep="\n")
    best = found.fitting[: found.plan.best]
    if not best:
        for choice in found.choices[:3]:
            print(f"{choice.candidate}: {found.reason(choice)}")
        print("nothing fits: give more accelerators, or shorter sequences")
        return
    print_table(HEADS, rows(found, best))
    print("\nMFU: the model's FLOPs, of pairs that the mask shows and without what is computed again, over the peak")
    print("\nwhere the time of the first goes\n")
    print_table(PARTS, parts(best[0]))
    print("\nwhat its blocks might keep instead\n")
    print_table(KEEPING, keeping(found))
    print(f"\n{rest(found)}\n\n{command_line(found, best[0], found.plan.out)}")


def heading(found: SearchResult) -> list[str]:
    """Model, cluster and step."""
    plan, sizes = found.plan, f"{found.model.parameters() / 1e9:.2f}B parameters"
    rows = f"{plan.rows} sequence{'s' if plan.rows > 1 else ''} of {found.length:,} tokens"
    return [
        f"{plan.model}, {sizes}, on {found.cluster.name}: a step of {rows}",
        f"{len(found.choices)} ways to run it, {len(found.fitting)} of which fit; predicted, not measured",
    ]


HEADS = (
    *(Column(name, text=True) for name in ("attention", "mesh")),
    *map(Column, ("step (s)", "MFU (%)", "device (GiB)", "host (GiB)")),
    *(Column(name, text=True, below=True) for name in ("keeps", "reason")),
)


def rows(found: SearchResult, best: list[Choice]) -> Iterator[list[str]]:
    """A line for each choice."""
    for choice in best:
        why = "" if choice is best[0] else found.reason(choice)
        names = [str(choice.candidate.attention), str(choice.candidate.mesh)]
        memory = [gib(choice.memory.device), gib(choice.memory.host)]
        figures = [significant(choice.time.seconds, best[0].time.seconds), f"{100 * choice.mfu:.1f}", *memory]
        yield [*names, *figures, keeps(choice), why]


def significant(number: float, first: float) -> str:
    """A number, to as many decimals as give the first one four digits."""
    return f"{number:,.{max(0, 3 - floor(log10(first)))}f}"


def keeps(choice: Choice) -> str:
    """What blocks keep, and where things are."""
    kept = choice.checkpointing
    tiled = ", chunked MLP" if kept.tiled else ""
    optimizer = ", optimizer on the host" if choice.on_host else ""
    return f"{'no recompute' if kept.policy == 'none' else checkpoints(kept)}{tiled}{optimizer}"


PARTS = (Column("part of a step", text=True), Column("share (%)"), Column("time (ms)"))


def parts(choice: Choice) -> Iterator[list[str]]:
    """What the first choice's time goes to."""
    total = choice.time.seconds
    for name, seconds in choice.time.parts().items():
        if seconds > 0:
            yield [name, f"{100 * seconds / total:.1f}", f"{1000 * seconds:,.1f}"]


KEEPING = (
    Column("keeps", text=True),
    *map(Column, ("step (s)", "MFU (%)", "device (GiB)", "host (GiB)")),
    Column("fits", text=True),
)


def keeping(found: SearchResult) -> Iterator[list[str]]:
    """The first choice's mesh and method with each policy, at its best; those that do not fit come last."""
    told = set[tuple[str, bool, bool]]()
    for choice in found.others:
        kept = choice.checkpointing
        kind = kept.policy, kept.offload, choice.fits
        if kind in told or (kept.policy, kept.offload, True) in told:
            continue
        told.add(kind)
        sizes = gib(choice.memory.device), gib(choice.memory.host)
        fits = "yes" if choice.fits else f"no: {missing(choice.memory, found.room)}"
        yield [keeps(choice), f"{choice.time.seconds:,.4g}", f"{100 * choice.mfu:.1f}", *sizes, fits]


def rest(found: SearchResult) -> str:
    """Counts of the candidates that are not shown."""
    slower = len(found.fitting) - min(len(found.fitting), found.plan.best)
    limits = Counter(found.room.limit(choice.memory) for choice in found.choices if not choice.fits)
    full = [f"{count} need more memory on the {where}" for where, count in limits.most_common()]
    return "; ".join([f"{slower} more fit and are slower", *full])
