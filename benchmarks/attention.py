"""Forward and backward of attention methods relative to torch's context-parallel ring, in one run.

    uv run python benchmarks/attention.py                                   # 2,048 and 8,192 tokens on 1, 2, 4, 8 ranks
    uv run python benchmarks/attention.py --tokens 2048 --ranks 4 --repeats 5

Contenders alternate within each repeat, each behind a barrier; the time of a turn is that of its slowest rank. Figures
are medians of the ratios within a repeat.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.attention import (
    AllGatherKV,
    AttentionMask,
    Local,
    Method,
    Ring,
    TokenRing,
    Ulysses,
    WallFacer,
    build_attention,
)
from armillary.attention.tiling.grid import Grid
from armillary.core import CommLedger, SequenceLayout
from armillary.core.testing import World, mesh
from armillary.data.console.units import count_argument

sys.path.insert(0, str(Path(__file__).parent))
import report

HEADS, HEAD_DIM = 8, 64
MASK, FULL = AttentionMask(causal=True), AttentionMask(causal=False)
METHODS = ("ring", "token_ring", "wallfacer", "all_gather", "ulysses", "usp")
Turn = Callable[[], None]


def contender(name: str, ranks: int) -> Method:
    if name == "usp":
        return build_attention("usp", mesh(ring=ranks // 2, ulysses=2))
    return build_attention(name, mesh(ulysses=ranks) if name == "ulysses" else mesh(ring=ranks))


def turn_of(attend: Method, tokens: int, mask: AttentionMask = MASK) -> Turn:
    """A turn: forward and backward of this rank's zigzag shard."""
    layout = attend.layout(tokens)
    q, k, v, dout = inputs(layout.sizes[attend.shard])

    def turn() -> None:
        out = attend(q, k, v, mask=mask, layout=layout)
        torch.autograd.grad(out, (q, k, v), dout)

    return turn


def inputs(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, tokens, HEADS, HEAD_DIM, generator=generator) for _ in range(4))
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def torch_ring(ranks: int, tokens: int) -> Turn:
    """torch's private context-parallel ring over the CPU flash op, load-balanced: a zigzag layout."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as cp

    aten = torch.ops.aten
    group = mesh(ring=ranks)["ring"].get_group()
    q, k, v, dout = (x.detach().transpose(1, 2) for x in inputs(tokens // ranks))
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def turn() -> None:
        out, lse, *_ = cp._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True, dropout_p=0.0)
        cp._templated_ring_attention_backward(
            group, 2, backward, dout, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
        )

    return turn


def kernels_alone(ranks: int, tokens: int) -> Turn:
    """A turn: all kernel calls of a ring on this rank, without exchanges, merges or autograd."""
    layout = contender("ring", ranks).layout(tokens)
    rank = dist.get_rank()
    q, k, v, dout = (x.detach().transpose(1, 2) for x in inputs(layout.sizes[rank]))
    grid = Grid(layout, layout, MASK)
    calls = [tile for shard in range(ranks) for tile in grid.tiles(rank, shard, 0)]
    aten = torch.ops.aten

    def turn() -> None:
        for tile in calls:
            rows, columns = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            causal = tile.high is not None
            part = q[:, :, rows], k[:, :, columns], v[:, :, columns]
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*part, 0.0, causal)
            aten._scaled_dot_product_flash_attention_for_cpu_backward(dout[:, :, rows], *part, out, lse, 0.0, causal)

    return turn


def measure(ranks: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Returns on each rank the seconds of each turn by contender, and the bytes sent by each method."""
    torch.manual_seed(0)
    turns: dict[str, Turn] = {"kernels alone": kernels_alone(ranks, tokens)}
    if ranks > 1:
        turns["torch ring"] = torch_ring(ranks, tokens)
    names = METHODS if ranks > 1 else ("local",)
    methods = {name: Local() if name == "local" else contender(name, ranks) for name in names}
    turns |= {name: turn_of(attend, tokens) for name, attend in methods.items()}
    for turn in turns.values():  # warm up
        turn()
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(repeats):
        for name, turn in turns.items():
            seconds[name].append(seconds_of(turn))
    sent_bytes = {
        name: {
            "causal": sent_bytes_of(turn_of(attend, tokens)),
            "full": sent_bytes_of(turn_of(attend, tokens, FULL)),
            "closed form": closed_form(attend, tokens // ranks),
        }
        for name, attend in methods.items()
    }
    return {"seconds": seconds, "sent": sent_bytes}


def sent_bytes_of(turn: Turn) -> int:
    with CommLedger() as ledger:
        turn()
    return ledger.bytes()


def seconds_of(turn: Turn) -> float:
    """Seconds until all ranks have finished the turn."""
    dist.barrier()
    start = time.perf_counter()
    turn()
    dist.barrier()
    return time.perf_counter() - start


def rows_of(ranks: int, tokens: int, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    seconds = {
        name: [max(times) for times in zip(*(r["seconds"][name] for r in results), strict=True)]
        for name in results[0]["seconds"]
    }
    rows: list[dict[str, Any]] = []
    for name, times in seconds.items():
        sent_bytes = [result["sent"].get(name, {}) for result in results]
        causal, full, form = (
            sum(s.get(key, 0) for s in sent_bytes) / ranks for key in ("causal", "full", "closed form")
        )
        rows.append(
            {
                "tokens": tokens,
                "ranks": ranks,
                "contender": name,
                "ms": 1000 * median(times),
                "of torch ring": report.median_ratio(times, seconds["torch ring"]) if ranks > 1 else None,
                "of kernels alone": report.median_ratio(times, seconds["kernels alone"]),
                "MB sent": causal / 1e6 if form else None,
                "MB, full mask": full / 1e6 if form else None,
                "full mask, of closed form": full / form if form else None,
            }
        )
    return rows


def closed_form(attend: Method, tokens: int) -> float:
    """Bytes that this rank sends forward and backward under a full mask, by the docstrings; float32, K = H."""
    ranks, row = attend.shards, tokens * HEADS * 4
    unit = row * HEAD_DIM  # B T H D e
    queries, keys = 4 * unit + row, 4 * unit  # a backward step that rotates queries or keys
    match attend:
        case Ulysses():
            size = attend.axis.size
            return 8 * unit * (size - 1) / size + closed_form(attend.inner, tokens * size) / size
        case Ring():
            return (ranks - 1) * (2 * unit + min(keys, queries))
        case TokenRing():
            return (ranks - 1) * (2 * unit + row + queries)
        case AllGatherKV():
            return (ranks - 1) * 6 * unit
        case WallFacer():
            team, ring = attend.teams.team_size, attend.teams.ring_size
            collective = (team - 1) * ((3 + 1) * unit + row + (3 + 2) * unit + row + 3 * unit)
            placed = (
                0
                if attend.teams.key_target(attend.team_index, attend.member) == attend.shard
                else team * (2 + 2 + 2) * unit
            )
            return collective + placed + (ring - 1) * team * (2 * unit + min(keys, queries))
        case _:
            return 0


def balance(ranks: int, tokens: int) -> float:
    """Largest over mean tile area of the ranks of a causal zigzag ring, in the worst step."""
    layout = SequenceLayout.zigzag(tokens, ranks)
    grid, worst = Grid(layout, layout, MASK), 1.0
    for step in range(ranks):
        cells = [grid.tiles(r, (r - step) % ranks, 0) for r in range(ranks)]
        areas = [sum(tile.area for tile in cell) for cell in cells]
        worst = max(worst, max(areas) * ranks / sum(areas))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=count_argument(), nargs="+", default=[2048, 8192])
    parser.add_argument("--ranks", type=count_argument(), nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=count_argument(), default=9)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        with World(ranks, timeout=600) as world:
            for tokens in options.tokens:
                print(f"{ranks} ranks, {tokens} tokens ...", file=sys.stderr, flush=True)
                rows += rows_of(ranks, tokens, world.run(measure, ranks, tokens, options.repeats))
    worst = max(balance(ranks, tokens) for ranks in options.ranks for tokens in options.tokens)
    notes = [
        f"batch 1, {HEADS} heads of {HEAD_DIM}, float32, causal, zigzag, forward and backward; one thread a rank",
        f"zigzag balance, slowest rank over mean by tile area, worst step: {worst:.3f}",
    ]
    notes.append(
        "under this mask a token travels no further than the last rank that sees it: with zigzag, ring and token_ring "
        "send three quarters of the bytes under a full mask"
    )
    print(report.write("attention", "Attention methods against torch's context-parallel ring", rows, notes))


if __name__ == "__main__":
    main()
