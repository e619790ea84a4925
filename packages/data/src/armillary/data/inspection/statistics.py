"""What is in a store, and what its packings cost: figures, without a screen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from armillary.core import SequenceLayout, attention_balance
from armillary.data.loader.batches import check_minimum
from armillary.data.loader.epochs import Waste
from armillary.data.loader.packed_sequences import PackedSequences, check_length
from armillary.data.loader.tree_rows import TreeRow
from armillary.data.packing import best_fit, greedy, one_per_row
from armillary.data.shuffle import Index
from armillary.data.store import TokenStore
from armillary.data.trees import SegmentTable

QUANTILES = (0.1, 0.5, 0.9, 0.99)


def describe(store: TokenStore) -> dict[str, Any]:
    """Counts of a store, and the lengths of its documents in tokens."""
    lengths = store.lengths
    quantiles = np.quantile(lengths, QUANTILES).tolist() if len(lengths) else []
    return {
        "name": store.name,
        "documents": len(store),
        "tokens": int(lengths.sum()),
        "bytes": sum(segment.nbytes for segment in store.segments),
        "dtype": store.segments[0].dtype.name,
        "vocabulary": store.vocabulary.size,
        "tokenizer": store.vocabulary.tokenizer,
        "end_of_document": store.vocabulary.end_of_document,
        "mean_length": float(lengths.mean()) if len(lengths) else 0.0,
        "longest": int(lengths.max(initial=0)),
        **{f"p{100 * q:g}": value for q, value in zip(QUANTILES, quantiles, strict=False)},
        **({} if store.trees is None else of_trees(store, store.trees)),
    }


def of_trees(store: TokenStore, trees: SegmentTable) -> dict[str, float]:
    """What a store of trees shares: sequences, tokens that they would have by themselves, and how many of these (%) are
    stored."""
    found = trees.figures(store.starts, store.stops)
    return found | {"stored_percent": 100 * store.tokens / max(found["unshared_tokens"], 1)}


@dataclass(frozen=True)
class Bin:
    """Documents of `least` to `most` tokens, and their tokens."""

    least: int
    most: int
    documents: int
    tokens: int


def histogram(lengths: Index) -> list[Bin]:
    """Documents by length: 0, 1, 2-3, 4-7, ... tokens, from the first of these that there is to the last."""
    if not len(lengths):
        return []
    bits = np.frexp(lengths.astype(np.float64))[1]  # n has b bits: 2^(b - 1) <= n < 2^b
    documents = np.bincount(bits)
    tokens = np.bincount(bits, lengths)
    first = int(np.argmax(documents > 0))
    edges = ((2**b // 2, max(2**b - 1, 0)) for b in range(first, len(documents)))
    counted = zip(edges, documents[first:].tolist(), tokens[first:].tolist(), strict=True)
    return [Bin(least, most, d, int(t)) for (least, most), d, t in counted]


@dataclass(frozen=True)
class MeasuredPacking:
    """What a packing costs, and how even rows are: slowest shard over mean in (query, key) pairs, mean and worst row.

    Args:
        documents: pieces of documents in a row, or segments of trees, on average.
        spans: of the shard that has most, under the balanced layout.
    """

    packing: str
    waste: Waste
    documents: float
    zigzag: float
    worst_zigzag: float
    balanced: float
    worst_balanced: float
    spans: int


def measure_packings(
    store: TokenStore,
    length: int,
    shards: int,
    rows: int,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> list[MeasuredPacking]:
    """Each packing of the store in rows of `length` tokens, over the first `rows` rows; of trees, those that cut none.

    Args:
        progress: called with the numbers of rows done, and of all.

    Raises:
        ValueError: no rows to look at, or what `PackedSequences` and layouts refuse.
    """
    check_minimum(1, rows=rows, length=length, shards=shards)
    check_length([store], length)
    zigzag = SequenceLayout.zigzag(length, shards)
    found: list[MeasuredPacking] = []
    packings = (greedy, best_fit, one_per_row) if store.trees is None else (best_fit, one_per_row)
    for i, packing in enumerate(packings):
        packed = PackedSequences(store, layout=zigzag, shard=0, rows_per_batch=1, packing=packing)
        made = [packed.row(number) for number in range(min(rows, packed.rows_per_epoch))]
        plain, even, spans = list[float](), list[float](), 0
        for j, row in enumerate(made):
            progress(i * rows + j, len(packings) * rows)
            seen: dict[str, Any] = {"mask": row.visible} if isinstance(row, TreeRow) else {"documents": row.ends}
            layout = SequenceLayout.balanced(length, shards, **seen)
            plain.append(attention_balance(zigzag, **seen))
            even.append(attention_balance(layout, **seen))
            spans = max(spans, *(len(layout.spans(shard)) for shard in range(shards)))
        documents = mean(len(row.ends) - 1 for row in made)
        worst = (mean(plain), max(plain), mean(even), max(even))
        found.append(MeasuredPacking(packing.__name__, packed.waste()[0], documents, *worst, spans))
    return found
