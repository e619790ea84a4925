"""TokenRing: its schedule, and its composition over two nodes."""

from __future__ import annotations

from armillary.plan.comm_volume import BytesOptions, plan_bytes
from paper_tables.table import NOT_AVAILABLE, Paper, Row, Table

FIGURE_5 = {"tokens": "64Ki", "heads": 32, "head_dim": 128, "ranks": 8, "causal": True, "of_ranks": (0,)}


def paper() -> Paper:
    return Paper("TokenRing", "2412.20501", [schedule()])


def schedule() -> Table:
    """Figures 3 to 5: sent bytes of each schedule, by its plan and by the ledger."""
    rows = list[Row]()
    for name, nodes in (("token_ring", None), ("ring+token_ring", 2)):
        for row in plan_bytes(BytesOptions(**FIGURE_5, attention=(name,), nodes=nodes)):
            title = f"{row.candidate.attention}, {row.phase}, MiB by the schedule and by the ledger"
            rows.append(Row(title, row.closed.total / 2**20, row.counted.total / 2**20))
    rows += [
        Row("Figure 4, table 1: speed on four GPUs", NOT_AVAILABLE, None),
        Row("Ascend", NOT_AVAILABLE, "not run: meshes are on cpu or cuda"),
    ]
    text = (
        "Queries travel forward while outputs return to their owners (figures 3 and 4); between nodes keys travel, and "
        "queries within (figure 5): `ring+token_ring`. The paper states no bytes: its column has those of our schedule "
        "of its figures, ours the ledger's. [Methods, step by step](../steps.md) plays both. 8 ranks, 65,536 tokens, "
        "32 heads of 128, causal."
    )
    return Table("Figures 3, 4 and 5, schedules", text, rows)
