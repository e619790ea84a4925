"""Compares predicted with measured orders, ratios and winners."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

TIE = 0.05
"""Relative difference of measured times below which either predicted order is right."""


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence about contenders with the same shapes."""
    ratios = {row["contender"]: row["predicted over ring"] / row["over ring"] - 1 for row in rows}
    worst = max(ratios, key=lambda name: abs(ratios[name]))
    best, chosen = max(rows, key=lambda row: row["over ring"]), min(rows, key=lambda row: row["predicted"])
    loss = best["over ring"] / chosen["over ring"] - 1
    return (
        f"{rows[0]['shapes']}: {misplaced(rows)}; predicted ratios over ring off by up to {ratios[worst]:+.0%} "
        f"({worst}); predicted best {chosen['contender']}, {loss:.0%} slower than the measured best, "
        f"{best['contender']}"
    )


def misplaced(rows: Sequence[dict[str, Any]]) -> str:
    """Pairs in wrongly predicted order, the faster one first, without ties."""
    ordered = sorted(rows, key=lambda row: -row["over ring"])
    wrong = [
        f"{fast['contender']} before {slow['contender']}"
        for fast, slow in combinations(ordered, 2)
        if fast["over ring"] > (1 + TIE) * slow["over ring"] and fast["predicted"] > slow["predicted"]
    ]
    return f"not predicted: {', '.join(wrong)}" if wrong else "ranking as predicted"
