"""Packed documents in the rows of a step, from a token store or drawn at random, on which layouts are compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from armillary.attention import AttentionMask
from armillary.data import best_fit, open_store
from armillary.data.parts import packed_rows

Rows = tuple[tuple[int, ...], ...]
"""Boundaries of the documents of each row: 0, end of the first document, ..., N."""

SIGMA = 1.0
"""Standard deviation of the logarithm of a document's length, about as in text from the web."""


def rows_of_store(path: Path, length: int, rows: int) -> Rows:
    """Returns the first `rows` rows of a store, packed by best fit. If the store has fewer, rows repeat.

    Raises:
        ValueError: the folder is no store.
    """
    ends = [row.ends for row in packed_rows(open_store(path), length, best_fit, rows)]
    return tuple(ends[i % len(ends)] for i in range(rows))


def sample_rows(mean: int, length: int, rows: int) -> Rows:
    """Returns rows of documents with lognormal lengths of mean `mean`. The end of a row cuts its last document."""
    rng, sampled_rows = np.random.default_rng(0), list[tuple[int, ...]]()
    for _ in range(rows):
        ends = [0]
        while ends[-1] < length:
            # The mean of a lognormal distribution is exp(mu + sigma^2 / 2), so mu = log(mean) - sigma^2 / 2.
            size = max(1, round(rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA)))
            ends.append(min(length, ends[-1] + size))
        sampled_rows.append(tuple(ends))
    return tuple(sampled_rows)


def mask_of(documents: Rows | None, batch: int) -> AttentionMask:
    """Returns the mask of the first `batch` rows: causal, and within documents if there are any."""
    if documents is None:
        return AttentionMask()
    return AttentionMask(documents=documents[0] if batch == 1 else documents[:batch])
