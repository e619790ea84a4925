"""Bytes against the papers: what they say is sent and held, and what the real methods are counted to send and hold.

    uv run python benchmarks/papers.py

Methods run on tensors without numbers, as one rank of a process group that sends nothing, under a ledger and a count of
live tensors. Nothing is timed; it takes ten seconds.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import memory
import report

from armillary.plan.comm_volume import BytesPlan, plan_bytes

SIZES = {"tokens": "64Ki", "heads": 64, "head_dim": 128, "ranks": 8}
HIDDEN = 65_536 * 64 * 128 * 2
"""Bytes of one [N, E] of these sizes in bfloat16."""


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the report")
    rows = [*sent_forward(), *sent_in_both(), *held()]
    notes = [
        "sent: by one rank, in one call of attention under a full mask, bfloat16; model M: 64Ki tokens, 52 heads of "
        "128, 64 ranks; S: 64Ki tokens, 64 heads of 128, 8 ranks",
        "arXiv: DeepSpeed-Ulysses 2309.14509, USP 2405.07719, WallFacer 2407.00611, UPipe 2602.21196",
    ]
    print(report.write("papers", "Bytes against the papers", rows, notes, parser.parse_args().out))


def row(what: str, source: str, unit: str, paper: float, counted: float, why: str) -> dict[str, Any]:
    return {"what": what, "by": source, "unit": unit, "paper": paper, "counted": counted, "why they differ": why}


def sent_forward() -> list[dict[str, Any]]:
    """WallFacer's paper on its model M, which `armillary-plan bytes` has by default."""
    ring, _, _, _, team, _ = plan_bytes(BytesPlan(attention=("ring", "wallfacer"), team=(4,)))
    why = "the paper counts a send for each of 64 steps; the first shard is at home"
    rows = [("Ring, sent forward, M", ring, why)]
    rows += [("WallFacer C = 4, sent forward, M", team, "the log-sum-exp goes along with each partial output")]
    return [
        row(what, "WallFacer", "GiB", r.published.total / 2**30, r.counted.total / 2**30, why) for what, r, why in rows
    ]


def sent_in_both() -> list[dict[str, Any]]:
    """USP's table 2 and DeepSpeed-Ulysses, forward and backward."""
    rows = {}
    for method in ("ulysses", "ring"):
        phases = plan_bytes(BytesPlan(**SIZES, attention=(method,), of_ranks=(0,)))
        rows[method] = [phase.counted.total / 2**30 for phase in phases]
    hidden, ranks = HIDDEN / 2**30, SIZES["ranks"]
    stays = "one part in 8 of each all-to-all stays where it is"
    return [
        row("Ulysses, sent forward, S", "DeepSpeed-Ulysses", "GiB", 4 * hidden / ranks, rows["ulysses"][0], stays),
        row("Ulysses, forward and backward, S", "USP", "GiB", 8 * hidden / ranks, sum(rows["ulysses"]), stays),
        row(
            "Ring, forward and backward, S",
            "USP",
            "GiB",
            4 * hidden,
            sum(rows["ring"]),
            "dk and dv go round too, summed in float32: 2 + 2 + 4 units, of which 7/8 are sent",
        ),
    ]


def held() -> list[dict[str, Any]]:
    """What UPipe's stages hold, by counting live tensors; WallFacer's peak is in `memory.py`, which takes minutes."""
    stages = memory.stages()[0]
    saved = 1 - stages["UPipe"] / stages["2H + 2K"]
    return [row("UPipe, share of q, k, v and out not held, S", "UPipe", "", 0.875, saved, "")]


if __name__ == "__main__":
    main()
