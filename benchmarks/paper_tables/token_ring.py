"""TokenRing: its schedule, and its composition over two nodes."""

from __future__ import annotations

from sent_bytes import CallSizes, sent_bytes

from armillary.plan.memory import AttentionChoice
from paper_tables.table import NOT_AVAILABLE, Paper, Row, Table

FIGURE_5 = CallSizes(heads=32, kv_heads=32, ranks=8, causal=True)


def paper() -> Paper:
    return Paper("TokenRing", "2412.20501", [schedule()])


def schedule() -> Table:
    """Figures 3 to 5: sent bytes of each schedule, by its plan and by the ledger."""
    rows = list[Row]()
    for attention in (AttentionChoice("token_ring"), AttentionChoice("ring+token_ring", nodes=2)):
        for phase, sent in sent_bytes(attention, FIGURE_5).items():
            title = f"{attention}, {phase}, MiB by the schedule and by the ledger"
            rows.append(Row(title, sent.plan / 2**20, sent.total / 2**20))
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
