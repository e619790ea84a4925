"""A new mask at every step: the time of an uncached mask, and the memory of many.

    uv run python benchmarks/masks.py                          # 1,000 masks of 1,000 documents over 64k tokens, 8 ranks
    uv run python benchmarks/masks.py --masks 50 --documents 10000 --tokens 1e6 --ranks 32 --kind tree

Each step builds a mask of random lengths (documents; prompts with 16 completions each; documents with an image each; or
explicit slices) and everything that a rank of a ring derives from it: the tokens that each rank must send on in either
direction, and the tiles of its blocks. Every tenth step also runs attention over `--attended` of the tokens on this
process, forward and backward, with another mask. The report has for each tenth of the run the median milliseconds of
processor time and the resident memory at its end: a cache that keeps masks would show as growth.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from armillary.attention import AttentionMask, Local, Slice
from armillary.attention.rings.topology import RingTopology
from armillary.attention.tiling.grid import grid_of
from armillary.core import SequenceLayout
from armillary.data.console.units import count_argument

sys.path.insert(0, str(Path(__file__).parent))
import report


def boundaries(tokens: int, documents: int, generator: random.Random) -> tuple[int, ...]:
    return (0, *sorted(generator.sample(range(1, tokens), documents - 1)), tokens)


def milliseconds(run: Callable[[], object]) -> float:
    """Milliseconds of processor time of this thread."""
    start = time.thread_time()
    run()
    return 1e3 * (time.thread_time() - start)


def trees(ends: tuple[int, ...]) -> AttentionMask:
    """Prompts with 16 completions each."""
    return AttentionMask.tree(ends, [-1 if part % 17 == 0 else part - part % 17 for part in range(len(ends) - 1)])


def images(ends: tuple[int, ...]) -> AttentionMask:
    """Documents whose later halves are images."""
    return AttentionMask.image_spans([range((a + b) // 2, b) for a, b in pairwise(ends)], documents=ends)


def slices(ends: tuple[int, ...]) -> AttentionMask:
    return AttentionMask.of_slices([Slice(range(a, b), range(a, b), None, 0) for a, b in pairwise(ends)])


KINDS: dict[str, Callable[[tuple[int, ...]], AttentionMask]] = {
    "documents": lambda ends: AttentionMask(documents=ends),
    "tree": trees,
    "images": images,
    "slices": slices,
}


def derive(layout: SequenceLayout, ends: tuple[int, ...], kind: str) -> None:
    """Computes everything that rank 0 of a ring needs of a mask before its first kernel call."""
    grid = grid_of(layout, layout, KINDS[kind](ends))
    RingTopology.of_all(layout.shards, "keys").cheaper_direction(grid)
    for shard in range(layout.shards):
        grid.tiles(0, shard, 0)


def attend(tokens: int, ends: tuple[int, ...], kind: str) -> None:
    q, k, v = (torch.randn(1, tokens, 2, 16, requires_grad=True) for _ in range(3))
    Local()(q, k, v, mask=KINDS[kind](ends)).sum().backward()


def resident() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def tenth(steps: int, layout: SequenceLayout, options: argparse.Namespace, generator: random.Random) -> dict[str, Any]:
    documents, attended, kind = options.documents, options.attended, options.kind
    derived, attending = list[float](), list[float]()
    for step in range(steps):
        ends = boundaries(layout.length, documents, generator)
        derived.append(milliseconds(lambda ends=ends: derive(layout, ends, kind)))
        if step % 10 == 0:
            ends = boundaries(attended, min(documents, attended // 2), generator)
            attending.append(milliseconds(lambda ends=ends: attend(attended, ends, kind)))
    gc.collect()
    return {"new mask ms": median(derived), "attention ms": median(attending), "resident MiB": resident()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", type=count_argument(), default=1000)
    parser.add_argument("--documents", type=count_argument(), default=1000)
    parser.add_argument("--tokens", type=count_argument(), default=65536)
    parser.add_argument("--ranks", type=count_argument(), default=8)
    parser.add_argument("--attended", type=count_argument(), default=8192)
    parser.add_argument("--kind", choices=KINDS, default="documents")
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator, layout = random.Random(0), SequenceLayout.zigzag(options.tokens, options.ranks)
    tenth(20, layout, options, generator)  # warm up: libraries load, caches fill
    rows = list[dict[str, Any]]()
    for i in range(10):
        row = tenth(options.masks // 10, layout, options, generator)
        rows.append({"masks": (i + 1) * (options.masks // 10)} | row)
        print(f"{rows[-1]}", file=sys.stderr)
    subject = f"{options.masks:,} new masks of {options.documents:,} parts ({options.kind})"
    name = "masks" if options.kind == "documents" else f"masks-{options.kind}"
    print(report.write(name, f"{subject} over {options.tokens:,} tokens on {options.ranks} ranks", rows))


if __name__ == "__main__":
    main()
