"""Bytes and evenness of balanced layouts beside zigzag, on random documents and masks.

  python benchmarks/layout_bytes.py                       # 1,000 sets of lognormal documents on 2 to 32 ranks
  python benchmarks/layout_bytes.py --kind bimodal --mask window --by keys --sets 200

A set is a row of packed documents. Its bytes are those that all ranks of a ring send in one layer, forward and
backward, by the communication plan of `Ring` or, with `--by keys`, of `TokenRing`. Exits with 1 if a balanced layout
breaks the promise of `SequenceLayout.balanced`, in token-hops: never more than a zigzag layout that is as even or
within 1.10, and where zigzag is less even, at most 1.5 times as many, or so many that the saved pairs outweigh them.
"""

from __future__ import annotations

import random
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

from armillary.attention import AttentionMask, AttentionShape
from armillary.attention.plans import RingPlan, TokenRingPlan
from armillary.core import SequenceLayout, attention_balance, attention_traffic
from armillary.data.console import Bar
from armillary.data.console.units import count_argument

EVEN, FACTOR, SEND_COST = 1.10, 1.5, 1000
RANKS = (2, 3, 4, 8, 16, 32)
KINDS: dict[str, Callable[[random.Random, int], int]] = {
    "lognormal": lambda rng, _: int(rng.lognormvariate(7, 1.2)) + 16,
    "bimodal": lambda rng, length: rng.choice([200, length // 6]) + rng.randrange(100),
    "equal": lambda _, length: length // 24,
    "one huge": lambda rng, length: length * 2 // 3 if rng.random() < 0.02 else rng.randrange(16, 400),
}
MASKS: dict[str, Callable[[list[int], int], AttentionMask]] = {
    "documents": lambda ends, _: AttentionMask(documents=ends),
    "causal": lambda _ends, _: AttentionMask(),
    "window": lambda _ends, length: AttentionMask(window=(length // 10, 0)),
    "documents, window": lambda ends, length: AttentionMask(documents=ends, window=(length // 40, 0)),
    "both ways": lambda ends, _: AttentionMask(causal=False, documents=ends),
    "prefix": lambda ends, _: AttentionMask.prefix(ends, [(b - a) // 3 for a, b in pairwise(ends)]),
}


def drawn_documents(kind: str, rng: random.Random, length: int) -> list[int]:
    ends = [0]
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + KINDS[kind](rng, length)))
    return ends


def unevenness(layout: SequenceLayout, mask: AttentionMask, of_keys: bool) -> float:
    pairs = attention_balance(layout, mask=mask, of_keys=of_keys)
    return max(pairs, max(layout.sizes) * layout.shards / layout.length)


def sent_bytes(layout: SequenceLayout, mask: AttentionMask, of_keys: bool, heads: int, kv_heads: int) -> int:
    shape = AttentionShape.of(layout, mask, heads=heads, kv_heads=kv_heads, head_dim=128, dtype=torch.bfloat16)
    plan = (TokenRingPlan() if of_keys else RingPlan(backward="keys")).comm_plan(shape)
    return sum(plan.bytes(rank) for rank in range(layout.shards))


def measure(options: Namespace, seed: int) -> tuple[int, float, float, str]:
    """Returns (ranks, bytes over zigzag's, load of the most loaded rank, text of a broken promise or "") of a set."""
    rng, of_keys = random.Random(seed), options.by == "keys"
    ranks = rng.choice(RANKS)
    mask = MASKS[options.mask](drawn_documents(options.kind, rng, options.tokens), options.tokens)
    balanced = SequenceLayout.balanced(options.tokens, ranks, mask=mask, balanced_by=options.by)
    layouts = balanced, SequenceLayout.zigzag(options.tokens, ranks)
    load, zigzag_load = (unevenness(each, mask, of_keys) for each in layouts)
    sent, zigzag_sent = (sent_bytes(each, mask, of_keys, options.heads, options.kv_heads) for each in layouts)
    hops, zigzag_hops = (attention_traffic(each, mask=mask, of_queries=of_keys) for each in layouts)
    pairs, zigzag_pairs = (attention_balance(each, mask=mask, of_keys=of_keys) for each in layouts)
    saved_hops = (zigzag_pairs - pairs) * mask.pairs(options.tokens) / SEND_COST
    is_kept = hops <= zigzag_hops or (
        zigzag_load > max(load, EVEN) and hops <= max(FACTOR * zigzag_hops, zigzag_hops + saved_hops + 1e-6)
    )
    error = f"set {seed}, {ranks} ranks: {hops} token-hops at {load:.3f}; zigzag {zigzag_hops} at {zigzag_load:.3f}"
    return ranks, sent / max(1, zigzag_sent), load, "" if is_kept else error


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=count_argument(), default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=count_argument(), default=65536)
    parser.add_argument("--kind", choices=KINDS, default="lognormal")
    parser.add_argument("--mask", choices=MASKS, default="documents")
    parser.add_argument("--by", choices=("queries", "keys"), default="queries")
    parser.add_argument("--heads", type=count_argument(), default=32)
    parser.add_argument("--kv-heads", type=count_argument(), default=8)
    options = parser.parse_args()
    by_ranks, broken = defaultdict[int, list[tuple[float, float, int]]](list), list[str]()
    with Bar("layouts") as bar:
        for number in range(options.sets):
            bar.show("layouts", number, options.sets)
            ranks, ratio, load, error = measure(options, options.seed + number)
            by_ranks[ranks].append((ratio, load, options.seed + number))
            broken += [error] if error else []
    print(*broken, sep="\n")
    print("ranks  sets  bytes of zigzag: median    most  sets above 1.5  largest load")
    for ranks, sets in sorted(by_ranks.items()):
        ratios, loads, _ = zip(*sets, strict=True)
        above = sum(ratio > FACTOR for ratio in ratios)
        print(f"{ranks:5}{len(sets):6}{median(ratios):25.3f}{max(ratios):8.2f}{above:16}{max(loads):14.3f}")
    worst = sorted((each for sets in by_ranks.values() for each in sets), reverse=True)[:5]
    print("most bytes of zigzag's (set): " + ", ".join(f"{ratio:.2f} ({seed})" for ratio, _, seed in worst))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
