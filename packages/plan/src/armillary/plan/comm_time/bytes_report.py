"""Showing what methods send: a table for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from armillary.plan.comm_time.bytes import BytesPlan, Row, Sent
from armillary.plan.presets import amount

LEFT = (0, 1, 2, 8)
"""Columns of text."""


def as_json(plan: BytesPlan, rows: Sequence[Row]) -> str:
    """All of it, in bytes."""
    return json.dumps({"plan": asdict(plan), "rows": [asdict(row) for row in rows]}, indent=2)


def as_text(plan: BytesPlan, rows: Sequence[Row]) -> str:
    """What was counted, in GiB."""
    mask = f"causal, {plan.layout}" if plan.causal else "full mask"
    tokens, keys = amount(plan, "tokens"), plan.kv_heads or plan.heads
    shape = f"N {tokens:,}, H {plan.heads}, K {keys}, D {plan.head_dim}, B {plan.rows}"
    heading = [
        f"{shape}, {plan.dtype}, {mask}, {plan.ranks} {'rank' if plan.ranks == 1 else 'ranks'}",
        "GiB that one rank sends in one call of attention; paper: as WallFacer's counts it, a step for each rank",
        "",
    ]
    return "\n".join([*heading, *table(rows)])


def table(rows: Sequence[Row]) -> list[str]:
    """Point to point, in collectives, and together, as counted; by closed form; messages; as published."""
    cells = [("method", "ranks", "phase", "p2p", "collective", "all", "closed form", "messages", "paper")]
    cells += [cells_of(row) for row in rows]
    width = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(f"{cell:{'<' if i in LEFT else '>'}{width[i]}}" for i, cell in enumerate(line)).rstrip()
        for line in cells
    ]


def cells_of(row: Row) -> tuple[str, ...]:
    first, sent = row.phase == "forward", row.counted
    names = (title(row), ", ".join(map(str, row.ranks))) if first else ("", "")
    paper = "" if row.published is None else published(row.published)
    figures = map(gib, (sent.p2p, sent.collective, sent.total, row.closed.total))
    return (*names, row.phase, *figures, str(row.messages), paper)


def title(row: Row) -> str:
    """The method, and its axes where there are several."""
    attention, mesh = row.candidate.attention, row.candidate.mesh
    return f"{attention} ({mesh})" if min(mesh.ring, mesh.ulysses) > 1 else str(attention)


def published(sent: Sent) -> str:
    """Point to point and collective."""
    return gib(sent.p2p) if not sent.collective else f"{gib(sent.p2p)} + {gib(sent.collective)} = {gib(sent.total)}"


def gib(size: int) -> str:
    return f"{size / 2**30:,.5f}"
