"""New documents at every step: what a mask that was never seen before costs, and that nothing of it stays.

    uv run python benchmarks/masks.py                          # 1,000 masks of 1,000 documents over 64k tokens, 8 ranks
    uv run python benchmarks/masks.py --masks 200 --documents 4000 --tokens 1048576 --ranks 32

Each step makes a mask with documents of random lengths and all that a rank of a ring derives from it: what each rank
must pass on, both ways round, and the tiles of its own cells. Every tenth step also runs attention over `--attended` of
the tokens on this process, forward and backward. Shown by tenths of the run, in milliseconds of processor time
(medians), with the resident memory at the end of each tenth: a cache that keeps masks shows as growth.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from armillary.attention import AttentionMask, Local
from armillary.attention.rotation.topology import RingTopology
from armillary.attention.tiling.grid import grid_of
from armillary.core import SequenceLayout
from armillary.core.quantity import count_argument

sys.path.insert(0, str(Path(__file__).parent))
import report


def boundaries(tokens: int, documents: int, generator: random.Random) -> tuple[int, ...]:
    return (0, *sorted(generator.sample(range(1, tokens), documents - 1)), tokens)


def milliseconds(run: Callable[[], object]) -> float:
    """Of processor time, on this thread."""
    start = time.thread_time()
    run()
    return 1e3 * (time.thread_time() - start)


def derive(layout: SequenceLayout, ends: tuple[int, ...]) -> None:
    """What rank 0 of a ring finds out about a mask before its first kernel call."""
    grid = grid_of(layout, layout, AttentionMask(documents=ends))
    RingTopology.of_all(layout.shards, "keys").shorter_way(grid)
    for shard in range(layout.shards):
        grid.tiles(0, shard, 0)


def attend(tokens: int, ends: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(1, tokens, 2, 16, requires_grad=True) for _ in range(3))
    Local()(q, k, v, mask=AttentionMask(documents=ends)).sum().backward()


def resident() -> float:
    """MiB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def tenth(
    steps: int, layout: SequenceLayout, documents: int, attended: int, generator: random.Random
) -> dict[str, Any]:
    derived, attending = list[float](), list[float]()
    for step in range(steps):
        ends = boundaries(layout.length, documents, generator)
        derived.append(milliseconds(lambda ends=ends: derive(layout, ends)))
        if step % 10 == 0:
            share = boundaries(attended, min(documents, attended // 2), generator)
            attending.append(milliseconds(lambda share=share: attend(attended, share)))
    gc.collect()
    return {"new mask ms": median(derived), "attention ms": median(attending), "resident MiB": resident()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", type=count_argument(), default=1000)
    parser.add_argument("--documents", type=count_argument(), default=1000)
    parser.add_argument("--tokens", type=count_argument(), default=65536)
    parser.add_argument("--ranks", type=count_argument(), default=8)
    parser.add_argument("--attended", type=count_argument(), default=8192)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    generator, layout = random.Random(0), SequenceLayout.zigzag(asked.tokens, asked.ranks)
    tenth(20, layout, asked.documents, asked.attended, generator)  # warm up: libraries load, caches fill
    rows = list[dict[str, Any]]()
    for i in range(10):
        row = tenth(asked.masks // 10, layout, asked.documents, asked.attended, generator)
        rows.append({"masks": (i + 1) * (asked.masks // 10)} | row)
        print(f"{rows[-1]}", file=sys.stderr)
    of, over = f"{asked.masks:,} new masks of {asked.documents:,} documents", f"{asked.tokens:,} tokens"
    print(report.write("masks", f"{of} over {over} on {asked.ranks} ranks", rows))


if __name__ == "__main__":
    main()
