"""One prompt with several completions: packed as a tree, relative to sequences that repeat the prompt.

    uv run python benchmarks/tree.py                       # a prompt of 4k tokens with 16 completions of 256
    uv run python benchmarks/tree.py --prompt 1024 --answers 8 --answer 512 --ranks 4

Forward + backward time on one process, compared with the ratio of visible (query, key) pairs: medians of ratios, tree
and sequences alternating in one run. And the bytes that methods send for q, k, v and gradients on `--ranks` ranks, by
their plans and in layouts balanced for each mask, compared with the ratio of tokens. Exits with 1 if a ratio is more
than 1.2 times the one that it is compared with.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from armillary.attention import AttentionMask, AttentionShape, Local, build_comm_plan
from armillary.core import SequenceLayout
from armillary.data.console.units import count_argument

sys.path.insert(0, str(Path(__file__).parent))
import report

METHODS = ("ring", "token_ring", "all_gather", "ulysses+ring")
BAR = 1.2
"""Largest allowed quotient of a ratio and that of tokens or pairs."""


def tree_mask(prompt: int, answers: int, answer: int) -> AttentionMask:
    ends = [0, *(prompt + i * answer for i in range(answers + 1))]
    return AttentionMask.tree(ends, [-1, *[0] * answers])


def step(mask: AttentionMask, tensors: list[Tensor]) -> float:
    """Processor seconds of forward and backward."""
    start = time.process_time()
    q, k, v, dout = tensors
    out = Local()(q, k, v, mask=mask)
    torch.autograd.grad(out, (q, k, v), dout)
    return time.process_time() - start


def inputs(batch: int, tokens: int, heads: int, key_heads: int, dim: int) -> list[Tensor]:
    shapes = [(batch, tokens, n, dim) for n in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, requires_grad=i < 3) for i, shape in enumerate(shapes)]


def time_ratio(options: argparse.Namespace, tree: AttentionMask, tokens: int, length: int) -> float:
    sizes = (options.heads, options.key_heads, options.dim)
    packed, sequences = inputs(1, tokens, *sizes), inputs(options.answers, length, *sizes)
    ratios = list[float]()
    for turn in range(options.turns + 1):
        ratio = step(tree, packed) / step(AttentionMask(), sequences)
        ratios += [ratio] * (turn > 0)  # the first turn warms up
        print(f"turn {turn}: {ratio:.3f}", file=sys.stderr)
    return median(ratios)


def sent_bytes(name: str, options: argparse.Namespace, mask: AttentionMask, tokens: int, batch: int) -> int:
    """Bytes sent by all ranks, forward and backward, in a layout balanced for the mask."""
    ulysses = 2 if name.startswith("ulysses") else 1
    ring = options.ranks // ulysses
    layout = SequenceLayout.balanced(tokens, ring, mask=mask)
    sizes: dict[str, Any] = {"heads": options.heads, "kv_heads": options.key_heads, "head_dim": options.dim}
    work = AttentionShape.of(layout, mask, batch=batch, dtype=torch.bfloat16, **sizes)
    plan = build_comm_plan(name, work, ring, ulysses)
    return sum(plan.bytes(rank) for rank in range(options.ranks))


def row_of(what: str, ratio: float, size_ratio: float) -> dict[str, Any]:
    return {"what": what, "ratio": ratio, "ratio of tokens or pairs": size_ratio, "quotient": ratio / size_ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checked_options = {
        "prompt": 4096,
        "answers": 16,
        "answer": 256,
        "ranks": 8,
        "heads": 4,
        "key-heads": 2,
        "dim": 64,
        "turns": 5,
    }
    for name, value in checked_options.items():
        parser.add_argument(f"--{name}", type=count_argument(), default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    length, tokens = options.prompt + options.answer, options.prompt + options.answers * options.answer
    tree, each = tree_mask(options.prompt, options.answers, options.answer), AttentionMask()
    pair_ratio = tree.pairs(tokens) / (options.answers * each.pairs(length))
    token_ratio, rows = tokens / (options.answers * length), list[dict[str, Any]]()
    for name in METHODS:
        ratio = sent_bytes(name, options, tree, tokens, 1) / sent_bytes(name, options, each, length, options.answers)
        rows.append(row_of(f"bytes, {name}", ratio, token_ratio))
    ratio = time_ratio(options, tree, tokens, length)
    rows.append(row_of("forward + backward time", ratio, pair_ratio))
    title = (
        f"A tree of {options.prompt:,} tokens with {options.answers} times {options.answer}, against sequences apart"
    )
    print(report.write("tree", title, rows))
    sys.exit(any(row["quotient"] > BAR for row in rows))


if __name__ == "__main__":
    main()
