"""Time to choose a balanced layout: 1M tokens in 4,096 packed documents, on one core of the host.

  python benchmarks/layout_choice.py

Exits with 1 if the median of all cases is 50 ms or more.
"""

from __future__ import annotations

from statistics import median
from time import process_time

import numpy as np

from armillary.core import SequenceLayout, attention_traffic

TOKENS, DOCUMENTS, REPEATS, LIMIT_MS = 2**20, 4096, 5, 50


def drawn_documents(kind: str) -> list[int]:
    """Document boundaries with random lengths."""
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(0, 1.2, DOCUMENTS) if kind == "lognormal" else rng.random(DOCUMENTS)
    if kind == "one long":
        sizes[DOCUMENTS // 2] = sizes.sum() * 2
    ends = np.rint(np.cumsum(sizes) / sizes.sum() * TOKENS).astype(int)
    return sorted({0, *ends.tolist()})


def main() -> int:
    medians = list[float]()
    print(f"{'documents':12}{'ranks':>6}{'ms':>8}{'hops of a token':>18}{'in zigzag':>12}")
    for kind in ("uniform", "lognormal", "one long"):
        documents = drawn_documents(kind)
        for ranks in (8, 32, 64):
            seconds = list[float]()
            for _ in range(REPEATS):
                start = process_time()
                layout = SequenceLayout.balanced(TOKENS, ranks, documents=documents)
                seconds.append(process_time() - start)
            medians.append(1000 * median(seconds))
            layouts = layout, SequenceLayout.zigzag(TOKENS, ranks)
            hops = [attention_traffic(each, documents=documents) / TOKENS for each in layouts]
            print(f"{kind:12}{ranks:6}{medians[-1]:8.1f}{hops[0]:18.3f}{hops[1]:12.3f}")
    print(f"median: {median(medians):.1f} ms")
    return int(median(medians) >= LIMIT_MS)


if __name__ == "__main__":
    raise SystemExit(main())
