"""Output of a search: a table, or JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from armillary.core.quantity import gib
from armillary.plan.search.command_line import command_line
from armillary.plan.search.search import Choice, SearchResult, duration


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


def show(found: SearchResult, console: Console) -> None:
    """The best, why each is slower than the first, counts of the rest, and the command that trains the first."""
    for line in heading(found):
        console.print(line, highlight=False, soft_wrap=True)
    best = found.fitting[: found.plan.best]
    if not best:
        for choice in found.choices[:3]:
            console.print(f"{choice.candidate}: {found.reason(choice)}", highlight=False, soft_wrap=True)
        console.print("nothing fits: give more accelerators, or shorter sequences", highlight=False)
        return
    console.print(table(found, best))
    console.print(*parts(best[0]), sep="\n", highlight=False)
    console.print(rest(found), highlight=False, soft_wrap=True)
    console.print(f"\n{command_line(found, best[0], found.plan.out)}", highlight=False, soft_wrap=True)


def heading(found: SearchResult) -> list[str]:
    """Model, cluster and step."""
    plan, sizes = found.plan, f"{found.model.parameters() / 1e9:.2f}B parameters"
    rows = f"{plan.rows} sequence{'s' if plan.rows > 1 else ''} of {found.length:,} tokens"
    return [
        f"{plan.model}, {sizes}, on {found.cluster.name}: a step of {rows}",
        f"{len(found.choices)} ways to run it, {len(found.fitting)} of which fit; predicted, not measured",
    ]


def table(found: SearchResult, best: list[Choice]) -> Table:
    """A line for each choice."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("attention", "mesh", "keeps"):
        made.add_column(name)
    for name in ("step", "MFU", "device", "host"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("slower because")
    for choice in best:
        memory = (gib(choice.memory.device), gib(choice.memory.host))
        why = "" if choice is best[0] else found.reason(choice)
        names = (str(choice.candidate.attention), str(choice.candidate.mesh), keeps(choice))
        made.add_row(*names, duration(choice.time.seconds), f"{choice.mfu:.1%}", *memory, why)
    return made


def keeps(choice: Choice) -> str:
    """What blocks keep, and where things are."""
    kept = choice.checkpointing
    where = " on the host" if kept.offload else ""
    tiled = ", chunked MLP" if kept.tiled else ""
    optimizer = ", optimizer on the host" if choice.on_host else ""
    return f"{'no recompute' if kept.policy == 'none' else kept.policy.replace('_', ' ')}{where}{tiled}{optimizer}"


def parts(choice: Choice) -> list[str]:
    """What the first choice's time goes to."""
    spent = {name: seconds for name, seconds in choice.time.parts().items() if seconds > 0}
    width = max(map(len, spent))
    total = choice.time.seconds
    lines = [f"  {name:{width}}  {seconds / total:6.1%}  {duration(seconds)}" for name, seconds in spent.items()]
    return ["", "where the time of the first goes:", *lines, ""]


def rest(found: SearchResult) -> str:
    """Counts of the candidates that are not shown."""
    slower = len(found.fitting) - min(len(found.fitting), found.plan.best)
    limits = Counter(found.room.limit(choice.memory) for choice in found.choices if not choice.fits)
    full = [f"{count} need more memory on the {where}" for where, count in limits.most_common()]
    return "; ".join([f"{slower} more fit and are slower", *full])
