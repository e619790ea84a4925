"""WallFacer: bytes and memory by team size C."""

from __future__ import annotations

import json
from math import isqrt

import report
import torch

from armillary.attention import AttentionMask, AttentionShape
from armillary.core import SequenceLayout
from armillary.plan.comm_volume import BytesPlan, plan_bytes
from armillary.plan.memory.estimate import AttentionChoice
from paper_tables.table import NOT_AVAILABLE, Paper, Row, Table

GIB = 2**30
LLAMA_7B = {"tokens": "64Ki", "heads": 32, "head_dim": 128, "rows": 4, "ranks": 64}
"""Sizes of figure 1; the length is ours, and ratios do not depend on it."""
TEAMS = (2, 4, 8)


def paper() -> Paper:
    return Paper("WallFacer", "2407.00611", [example(), figure_1(), limits(), peak_memory()])


def sent() -> Paper:
    """Bytes alone."""
    return Paper("WallFacer", "2407.00611", [example()])


def example() -> Table:
    """Section 4.2.2: one block's forward of model M."""
    ring, _, _, _, team, _ = plan_bytes(BytesPlan(attention=("ring", "wallfacer"), team=(4,)))
    assert ring.published is not None and team.published is not None
    rows = [
        Row(
            "Ring, GiB",
            ring.published.total / GIB,
            ring.counted.total / GIB,
            "the paper counts 64 sends; the first shard is at home: 63 / 64 = 0.984",
        ),
        Row(
            "WallFacer C = 4, GiB",
            team.published.total / GIB,
            team.counted.total / GIB,
            "the log-sum-exp travels with partial outputs: 0.0006 GiB",
        ),
        Row("of which collective, GiB", team.published.collective / GIB, team.counted.collective / GIB),
        Row("of which p2p, GiB", team.published.p2p / GIB, team.counted.p2p / GIB),
    ]
    text = "Bytes of a block's forward: 65,536 tokens, 52 heads of 128, 64 ranks, full mask, on a rank that sends most."
    return Table("Section 4.2.2, model M", text, rows)


def figure_1() -> Table:
    """Peer-to-peer bytes of LLaMA-7B for every C."""
    found = plan_bytes(BytesPlan(**LLAMA_7B, attention=("ring", "wallfacer"), team=TEAMS, of_ranks=(1,)))
    p2p = dict[tuple[int, str], int]()
    for row in found:
        p2p[row.candidate.attention.team or 1, row.phase] = row.counted.p2p
    base = p2p[1, "forward"]
    rows = [Row("bars of the figure, GB", NOT_AVAILABLE, f"Ring {base / 1e9:.2f} forward at 64Ki tokens")]
    for team in TEAMS:
        # Ring makes P - 1 sends, and a team's first exchange is one of P / C^2.
        why = (
            f"Ring makes 63 sends of 64: {1 / team:.4g} x 64 / 63"
            if abs(team * p2p[team, "forward"] / base - 1)
            else ""
        )
        rows.append(Row(f"forward, C = {team}, share of Ring's", 1 / team, p2p[team, "forward"] / base, why))
    for team in TEAMS:
        ratio = p2p[team, "backward"] / p2p[1, "backward"]
        rows.append(Row(f"backward, C = {team}, share of Ring's", NOT_AVAILABLE, ratio))
    text = (
        "Peer-to-peer bytes of one block, LLaMA-7B, 64 ranks, batch 4. The text has no bars, but its equation 7: "
        "forward sends 2 B N H / C numbers."
    )
    return Table("Figure 1, bytes for every C", text, rows)


def limits() -> Table:
    """Sections 3.1, 3.2 and 4.2.1: all pairs in P / C^2 steps."""
    ranks = LLAMA_7B["ranks"]
    shape = AttentionShape.of(
        SequenceLayout.zigzag(2**16, ranks),
        AttentionMask(causal=False),
        heads=LLAMA_7B["heads"],
        kv_heads=LLAMA_7B["heads"],
        head_dim=LLAMA_7B["head_dim"],
        dtype=torch.bfloat16,
    )
    rows = list[Row]()
    for team in (1, *TEAMS):
        choice = AttentionChoice("ring") if team == 1 else AttentionChoice("wallfacer", team=team)
        steps = sum(any(step.pairs) for step in choice.comm_plan(shape, ranks, 1).forward)
        rows.append(Row(f"C = {team}: steps in which all pairs meet", ranks // team**2, steps))
    text = (
        "Attention as an n-body problem with direct interactions: P processors hold C copies of N / P bodies each, and "
        "meet all pairs in P / C^2 steps. With `A = B N E e / P` bytes in one tensor of a rank's tokens, forward "
        "sends\n\n"
        "    collective(C) = (C - 1) (4 A + lse)      q, k, v in; out and its log-sum-exp back\n"
        "    p2p(C)        = 2 A C (P / C^2) = 2 A P / C\n\n"
        f"At C = 1 it is Ring: 0 + 2 A P. At C = sqrt(P) = {isqrt(ranks)} there is no ring, only the first exchange: "
        "4 A (sqrt(P) - 1) + 2 A sqrt(P). So C lies in 1..sqrt(P) and C^2 divides P. The sum has its minimum over "
        "real C at C = sqrt(P / 2), where both derivatives, 4 A and 2 A P / C^2, are equal."
    )
    return Table("Sections 3.1, 3.2 and 4.2.1, limits of C", text, rows)


def peak_memory() -> Table:
    """Equation 10, from the stored simulation."""
    stored = json.loads((report.RESULTS / "memory-wallfacer.json").read_text())
    rows = [Row(f"{row['method']}: activations of [T, E]", row["paper"], row["sum"]) for row in stored["rows"]]
    text = (
        "Before the last block's attention in backward: L + 1 checkpoints and 3 C tensors for q, k and v, over the "
        f"memory of model and optimizer. Simulated by `{stored['command']}`, which takes minutes."
    )
    return Table("Equation 10, peak memory of model M", text, rows)
