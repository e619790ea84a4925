"""USP: bytes of methods, and of parallelisms around them."""

from __future__ import annotations

from armillary.plan.comm_volume import BytesPlan, plan_bytes
from paper_tables.table import Paper, Row, Table

SIZES = {"tokens": "64Ki", "heads": 64, "head_dim": 128, "ranks": 8, "of_ranks": (0,)}
HIDDEN = 65_536 * 64 * 128 * 2
"""Bytes of one [N, E] of these sizes in bfloat16."""
GROUPS = 8
STAYS = "1 part in 8 of each all-to-all stays where it is: 7 / 8 = 0.875"


def paper() -> Paper:
    return Paper("USP", "2405.07719", [attention_bytes()])


def sent() -> Paper:
    """Bytes alone."""
    return paper()


def attention_bytes() -> Table:
    """Bytes of attention alone, with as many key heads as query heads and with fewer."""

    def units(method: str, kv_heads: int | None = None) -> tuple[float, float]:
        phases = plan_bytes(BytesPlan(**SIZES, kv_heads=kv_heads, attention=(method,)))
        forward, backward = (phase.counted.total / HIDDEN for phase in phases)
        return forward, forward + backward

    ulysses, ring = units("ulysses"), units("ring")
    grouped_ulysses, grouped_ring = units("ulysses", 64 // GROUPS), units("ring", 64 // GROUPS)
    rows = [
        Row("Ulysses, forward (DeepSpeed-Ulysses)", 4 / 8, ulysses[0], STAYS),
        Row("Ulysses, forward and backward", 8 / 8, ulysses[1], STAYS),
        Row(
            "Ring, forward and backward",
            4.0,
            ring[1],
            "dK and dV travel too, summed in float32: 2 + 2 + 4 units in place of 4, and queries where they are fewer "
            "bytes (5 units and lse); 7 / 8 of them are sent",
        ),
        Row(f"Ulysses, GQA of {GROUPS}, forward and backward", 4 / 8 + 4 / 8 / GROUPS, grouped_ulysses[1], STAYS),
        Row(
            f"Ring, GQA of {GROUPS}, forward and backward",
            4 / GROUPS,
            grouped_ring[1],
            "dK and dV travel too, summed in float32: (2 + 2 + 4) / 8 units, of which 7 / 8 are sent",
        ),
    ]
    text = (
        "In units of O(bs L d), one tensor of all hidden states in bfloat16: 65,536 tokens, 64 heads of 128, 8 ranks, "
        "full mask. Paper inconsistent: Ring's 4 counts K and V forward and again backward, 2 + 2, without dK and dV, "
        "which every ring of keys sends: 2 + 2 + 2 = 6 in 16 bits."
    )
    return Table("Table 2, columns of activations: attention alone", text, rows)
