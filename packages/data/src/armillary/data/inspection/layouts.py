"""Cost of each sequence layout on the rows of a store: bytes sent around a ring, and balance of pairs and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from armillary.core import SequenceLayout, attention_balance, attention_traffic
from armillary.core.parts import mask_slices, uncut_spans
from armillary.data.loader.batches import check_minimum
from armillary.data.loader.epochs import PackedRow
from armillary.data.loader.packed_sequences import PackedSequences, check_length
from armillary.data.packing import Packing
from armillary.data.store import TokenStore

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
    """Returns at most the first `rows` rows of a packed store's first epoch.

    Raises:
        ValueError: no rows, or `PackedSequences` refuses an argument.
    """
    check_minimum(1, rows=rows, length=length)
    check_length([store], length)
    layout = SequenceLayout.contiguous(length, 1)
    sequences = PackedSequences(store, layout=layout, shard=0, rows_per_batch=1, packing=packing)
    return [sequences.row(number) for number in range(min(rows, sequences.rows_per_epoch))]


def mask_of(row: PackedRow) -> dict[str, Any]:
    """Returns the mask of a row as keyword arguments, such as for `SequenceLayout.balanced`."""
    return {"documents": row.ends}


def layout_for(name: str, row: PackedRow, shards: int) -> SequenceLayout | None:
    """Returns the layout named `name` for a row; None if uncut documents would leave a shard without tokens."""
    length = row.ends[-1]
    if name == "balanced":
        return SequenceLayout.balanced(length, shards, **mask_of(row))
    if name == "uncut documents":
        spans = uncut_spans(length, shards, mask_slices(length, True, None, row.ends))
        return SequenceLayout(spans) if all(spans) else None
    return getattr(SequenceLayout, name)(length, shards)


def measure_layouts(
    rows: Sequence[PackedRow],
    shards: int,
    token_bytes: int,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[LayoutStatistics]:
    """Returns the cost of each layout on some rows. Layouts that no row has are left out.

    Args:
        token_bytes: bytes sent per token and hop, forward and backward.
        progress: called with the number of measured rows and the number of all rows, counted for each layout.

    Raises:
        ValueError: no rows, or more shards than tokens.
    """
    check_minimum(1, rows=len(rows), shards=shards)
    SequenceLayout.contiguous(rows[0].ends[-1], shards)  # refuses more shards than tokens
    statistics: list[LayoutStatistics] = []
    for i, name in enumerate(LAYOUTS):
        hops, pairs, tokens, spans = list[float](), list[float](), list[float](), 0
        for j, row in enumerate(rows):
            progress(i * len(rows) + j, len(LAYOUTS) * len(rows))
            layout = layout_for(name, row, shards)
            if layout is None:
                continue
            hops.append(attention_traffic(layout, **mask_of(row)) / layout.length)
            pairs.append(attention_balance(layout, **mask_of(row)))
            tokens.append(max(layout.sizes) * shards / layout.length)
            spans = max(spans, *(len(layout.spans(shard)) for shard in range(shards)))
        if hops:
            tokens_per_shard = rows[0].ends[-1] / shards
            sent_bytes = mean(hops) * tokens_per_shard * token_bytes
            balance = mean(pairs), max(pairs), mean(tokens), max(tokens)
            statistics.append(LayoutStatistics(name, len(hops), mean(hops), sent_bytes, *balance, spans))
    return statistics


def bytes_per_token_hop(kv_heads: int, head_dim: int) -> int:
    """Returns the bytes sent around a ring per token and hop: k and v in forward; k, v, dk and dv in backward."""
    return 2 * kv_heads * head_dim * (2 * ELEMENT + GRADIENT)
