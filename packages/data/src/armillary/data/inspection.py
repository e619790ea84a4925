"""Figures of a store for `armillary-data info`: lengths of documents, and the cost of each sequence layout on its rows.

The cost of a layout is the bytes that a rank sends around a ring, and the balance of (query, key) pairs and of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from armillary.core import SequenceLayout, attention_balance, attention_traffic
from armillary.core.internal import mask_slices, uncut_spans
from armillary.data.loader.batches import check_minimum
from armillary.data.loader.packed_sequences import PackedRow, PackedSequences, check_length
from armillary.data.packing import Packing
from armillary.data.store import Index, TokenStore

# -- documents --------------------------------------------------------------------------------------------------------

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


# -- layouts ----------------------------------------------------------------------------------------------------------

LAYOUTS = ("zigzag", "contiguous", "striped", "balanced", "uncut documents")
"""Names of the measured layouts. In "uncut documents" each document is completely on one shard."""
ELEMENT, GRADIENT = 2, 4
"""Bytes of an element of k and v (bfloat16), and of an element of their accumulated gradients (float32)."""


@dataclass(frozen=True)
class LayoutStatistics:
    """Cost of one layout, on average over rows.

    Args:
        rows: number of rows that have such a layout; "uncut documents" needs a document, or padding, for each shard.
        hops: number of times that a token is sent to the next rank, in one rotation of keys around a ring.
        sent_bytes: mean bytes that a rank sends in one layer, forward and backward.
        pairs: (query, key) pairs of the shard with the most pairs, divided by the mean of all shards.
        tokens: tokens of the largest shard, divided by the mean of all shards.
        worst_pairs, worst_tokens: the largest `pairs` and the largest `tokens` of a single row.
        spans: largest number of spans of a shard, in any row.
    """

    layout: str
    rows: int
    hops: float
    sent_bytes: float
    pairs: float
    worst_pairs: float
    tokens: float
    worst_tokens: float
    spans: int


def packed_rows(store: TokenStore, length: int, packing: Packing, rows: int) -> list[PackedRow]:
    """Returns at most the first `rows` rows of a packed store's first epoch."""
    check_minimum(1, rows=rows, length=length)
    check_length([store], length)
    layout = SequenceLayout.contiguous(length, 1)
    sequences = PackedSequences(store, layout=layout, shard=0, rows_per_batch=1, packing=packing)
    return [sequences.row(number) for number in range(min(rows, sequences.rows_per_epoch))]


def measure_layouts(
    rows: Sequence[PackedRow],
    shards: int,
    token_bytes: int,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[LayoutStatistics]:
    """Returns the cost of each layout on some rows, at least one. Layouts that no row has are left out.

    Args:
        token_bytes: bytes sent per token and hop, forward and backward.
        progress: called with the number of measured rows and the number of all rows, counted for each layout.
    """
    check_minimum(1, shards=shards)
    length = rows[0].ends[-1]
    statistics: list[LayoutStatistics] = []
    for i, name in enumerate(LAYOUTS):
        hops, pairs, tokens, spans = list[float](), list[float](), list[float](), 0
        for j, row in enumerate(rows):
            progress(i * len(rows) + j, len(LAYOUTS) * len(rows))
            if name == "balanced":
                layout = SequenceLayout.balanced(length, shards, documents=row.ends)
            elif name == "uncut documents":
                uncut = uncut_spans(length, shards, mask_slices(length, True, None, row.ends))
                if not all(uncut):  # fewer documents than shards
                    continue
                layout = SequenceLayout(uncut)
            else:
                layout = getattr(SequenceLayout, name)(length, shards)
            hops.append(attention_traffic(layout, documents=row.ends) / length)
            pairs.append(attention_balance(layout, documents=row.ends))
            tokens.append(max(layout.sizes) * shards / length)
            spans = max(spans, *(len(layout.spans(shard)) for shard in range(shards)))
        if hops:
            sent_bytes = mean(hops) * length / shards * token_bytes
            balance = mean(pairs), max(pairs), mean(tokens), max(tokens)
            statistics.append(LayoutStatistics(name, len(hops), mean(hops), sent_bytes, *balance, spans))
    return statistics


def bytes_per_token_hop(kv_heads: int, head_dim: int) -> int:
    """Returns the bytes sent around a ring per token and hop: k and v in forward; k, v, dk and dv in backward."""
    return 2 * kv_heads * head_dim * (2 * ELEMENT + GRADIENT)
