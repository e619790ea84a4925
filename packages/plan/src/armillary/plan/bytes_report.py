"""Showing what methods send: a table for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from armillary.core.table import Column, print_table
from armillary.plan.comm_volume import BytesPlan, Row, Sent
from armillary.plan.presets import amount

HEADS = (
    Column("method", text=True),
    Column("rank", text=True),
    Column("phase", text=True),
    *map(Column, ("p2p (GiB)", "collective (GiB)", "all (GiB)", "closed form (GiB)", "sends")),
    Column("paper (GiB)", text=True, below=True),
)
"""Point to point, in collectives, and together, as counted; by closed form; messages; as published."""


def as_json(plan: BytesPlan, rows: Sequence[Row]) -> str:
    """All of it, in bytes."""
    return json.dumps({"plan": asdict(plan), "rows": [asdict(row) for row in rows]}, indent=2)


def show(plan: BytesPlan, rows: Sequence[Row]) -> None:
    """Prints what was counted, in GiB."""
    mask = f"causal, {plan.layout}" if plan.causal else "full mask"
    tokens, keys = amount(plan, "tokens"), plan.kv_heads or plan.heads
    shape = f"N {tokens:,}, H {plan.heads}, K {keys}, D {plan.head_dim}, B {plan.rows}"
    print(f"{shape}, {plan.dtype}, {mask}, {plan.ranks} {'rank' if plan.ranks == 1 else 'ranks'}")
    print("what one rank sends in one call of attention; paper: as WallFacer's counts it, a step for each rank\n")
    print_table(HEADS, map(cells_of, rows))


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
