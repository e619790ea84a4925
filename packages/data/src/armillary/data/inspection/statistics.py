"""Statistics of stores, and the cost of packing them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from armillary.core import SequenceLayout
from armillary.data.inspection.layouts import measure_layouts
from armillary.data.loader.batches import check_minimum
from armillary.data.loader.epochs import Waste
from armillary.data.loader.packed_sequences import PackedSequences, check_length
from armillary.data.packing import best_fit, greedy, one_per_row
from armillary.data.shuffle import Index
from armillary.data.store import TokenStore

QUANTILES = (0.1, 0.5, 0.9, 0.99)


def describe(store: TokenStore) -> dict[str, Any]:
    """Returns name, counts and vocabulary of a store, and lengths of documents in tokens (mean, longest, quantiles)."""
    lengths = store.lengths
    quantiles = np.quantile(lengths, QUANTILES).tolist() if len(lengths) else []
    return {
        "name": store.name,
        "documents": len(store),
        "tokens": store.tokens,
        "bytes": sum(array.nbytes for array in store.arrays),
        "dtype": store.arrays[0].dtype.name,
        "vocabulary": store.vocabulary.size,
        "tokenizer": store.vocabulary.tokenizer,
        "end_of_document": store.vocabulary.end_of_document,
        "mean_length": float(lengths.mean()) if len(lengths) else 0.0,
        "longest": int(lengths.max(initial=0)),
        **{f"p{100 * q:g}": value for q, value in zip(QUANTILES, quantiles, strict=False)},
    }


@dataclass(frozen=True)
class Bin:
    """Documents of `minimum` to `maximum` tokens, and the sum of their tokens."""

    minimum: int
    maximum: int
    documents: int
    tokens: int


def histogram(lengths: Index) -> list[Bin]:
    """Counts documents with 0, 1, 2-3, 4-7, ... tokens, from the shortest document's bin to the longest one's."""
    if not len(lengths):
        return []
    bits = np.frexp(lengths.astype(np.float64))[1]  # b for lengths of b bits, 2^(b - 1) <= n < 2^b; 0 for 0
    documents, tokens = np.bincount(bits), np.bincount(bits, lengths)
    first = int(np.argmax(documents > 0))
    return [Bin(2**b // 2, max(2**b - 1, 0), int(documents[b]), int(tokens[b])) for b in range(first, len(documents))]


@dataclass(frozen=True)
class PackingStatistics:
    """Cost of a packing, and the balance and hops of its rows in some layouts.

    The balance of a row is the number of (query, key) pairs of the shard with the most pairs, divided by the mean of
    all shards.

    Args:
        documents: mean number of pieces of documents in a row.
        zigzag, balanced: mean balance of the rows in these layouts.
        worst_zigzag, worst_balanced: largest balance of a single row in these layouts.
        spans: largest number of spans of a shard in the balanced layout.
        zigzag_hops, contiguous_hops, balanced_hops: mean number of times that a token is sent to the next rank, in one
            rotation of keys around a ring.
    """

    packing: str
    waste: Waste
    documents: float
    zigzag: float
    worst_zigzag: float
    balanced: float
    worst_balanced: float
    spans: int
    zigzag_hops: float
    contiguous_hops: float
    balanced_hops: float


def measure_packings(
    store: TokenStore,
    length: int,
    shards: int,
    rows: int,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[PackingStatistics]:
    """Measures every packing of a store in rows of `length` tokens.

    Args:
        rows: number of rows whose balance is measured, at most those of an epoch.
        progress: called with the number of measured rows and the number of all rows, over all packings and layouts.

    Raises:
        ValueError: no rows, or an argument that `PackedSequences` or a layout refuses.
    """
    check_minimum(1, rows=rows, length=length, shards=shards)
    check_length([store], length)
    SequenceLayout.zigzag(length, shards)  # refuses more shards than tokens
    packings = (greedy, best_fit, one_per_row)
    statistics: list[PackingStatistics] = []
    for i, packing in enumerate(packings):
        layout = SequenceLayout.contiguous(length, 1)
        sequences = PackedSequences(store, layout=layout, shard=0, rows_per_batch=1, packing=packing)
        sample = [sequences.row(number) for number in range(min(rows, sequences.rows_per_epoch))]

        # Reports the progress over all packings: `total` rows are measured for each.
        def show(done: int, total: int, i: int = i) -> None:
            progress(i * total + done, len(packings) * total)

        zigzag, contiguous, balanced = measure_layouts(sample, shards, 0, ("zigzag", "contiguous", "balanced"), show)
        documents = mean(len(row.pieces) for row in sample)
        balance = (zigzag.pairs, zigzag.worst_pairs, balanced.pairs, balanced.worst_pairs)
        hops = (zigzag.hops, contiguous.hops, balanced.hops)
        waste = sequences.waste()[0]
        statistics.append(PackingStatistics(packing.__name__, waste, documents, *balance, balanced.spans, *hops))
    return statistics
