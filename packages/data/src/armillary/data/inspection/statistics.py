"""Statistics of the documents of a store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

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
