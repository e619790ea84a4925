"""UPipe: memory of its stages, lengths and throughput."""

from __future__ import annotations

import json
from typing import Any

import report

from paper_tables.table import NOT_AVAILABLE, Paper, Row, Table


def paper() -> Paper:
    return Paper("UPipe", "2602.21196", [stages(), figure_1()])


def stored(name: str) -> tuple[str, list[dict[str, Any]]]:
    """(command, rows) of a stored report."""
    data = json.loads((report.RESULTS / f"memory-{name}.json").read_text())
    return data["command"], data["rows"]


def stages() -> Table:
    """Share of attention's tensors that stages save."""
    command, rows = stored("stages")
    saved = {(row["H"], row["K"], row["S"]): 1 - row["UPipe"] / row["2H + 2K"] for row in rows}
    text = f"Share of q, k, v and out that a stage of 8 heads does not hold, on 8 ranks, counted by `{command}`."
    return Table(
        "87.5% less for 32B",
        text,
        [
            Row("64 query heads, 64 key heads", 0.875, saved[64, 64, 8]),
            Row(
                "64 query heads, 8 key heads",
                NOT_AVAILABLE,
                saved[64, 8, 8],
                "keys of all groups are there: 1 - (2 x 8 + 2 x 8) / (2 x 64 + 2 x 8) = 0.778",
            ),
        ],
    )


def figure_1() -> Table:
    """Longest sequences on 8 H100."""
    command, rows = stored("contexts")
    tokens = {(row["cluster"], row["attention"].split()[0]): row["tokens, M"] for row in rows}
    node = {name: length for (cluster, name), length in tokens.items() if cluster.startswith("8 ")}
    kept = "the host's 2 TB hold 6.9M tokens' inputs of blocks; the paper's steps are whole millions"
    text = f"LLaMA-3-8B on 8 x H100, inputs of blocks and the optimizer on the host; simulated by `{command}`."
    return Table(
        "Figure 1, longest sequences",
        text,
        [
            Row("UPipe, million tokens", 5.0, node["upipe"], kept),
            Row(
                "UPipe over the best of the others",
                1.25,
                node["upipe"] / max(node["ulysses"], node["usp"], node["ring"]),
                "the paper says more than 25%: 5M over 4M",
            ),
            *(Row(f"{name}, million tokens", NOT_AVAILABLE, node[name]) for name in ("ulysses", "usp", "ring")),
        ],
    )
