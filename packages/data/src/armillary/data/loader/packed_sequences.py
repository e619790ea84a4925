"""Rows of N tokens packed from documents, of which each rank reads its own shard.

`PackedSequences` numbers the rows of all stores, mixed by weight (`source_at`); `Epochs` numbers those of one store;
`read_shard` reads a rank's shard of a row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from threading import Lock

import numpy as np
import torch

from armillary.core import SequenceLayout
from armillary.core.internal import Spans
from armillary.data.loader.batches import Batch, Batches, Documents
from armillary.data.packing import DocumentPiece, Packed, Packing, greedy, permutation
from armillary.data.store import IGNORE, Index, TokenStore

ORDER_VERSION = 1
"""Version of the order of rows, part of the state. It increases when a release makes different rows from the same
stores, weights, N, packing and seed, so that a state of an earlier release is refused."""


class PackedSequences(Batches):
    """Batches of rows of exactly N tokens, packed from one or several stores; each rank reads its own shard.

    An epoch packs every document once, in a new order. Several stores are mixed row by row, by weight, and
    each store starts its next epoch when its rows are used up. The tokens of row r depend only on the stores, N, the
    packing, the weights and the seed, which must be equal on all ranks; layouts and the number of ranks decide which
    rank holds which token.

    A rank reads the tokens of its shard, and no others but one for each span. No communication. The loader takes 16
    bytes of memory per document, and each of two packed epochs 24 per piece of a document and 16 per row. A new
    iteration continues after the last batch that was returned, or from the loaded state.

    Args:
        stores: one or several stores of the same tokenizer.
        layout: layout of a row's `layout.length` tokens, N, over shards.
        shard: this rank's shard of the layout.
        rows_per_batch: rows of one replica's batch, B.
        weights: relative number of rows from each store. By default the number of rows in an epoch of the store, so
            that the epochs of all stores end together. Only ratios matter: [1, 3] and [0.25, 0.75] give equal rows.
        replica, replicas: index of this rank's data-parallel group and number of these groups. Each group reads other
            `rows_per_batch` rows of a global batch.
        packing: a packing function; its name is part of the state.
        reset_positions: count positions from the start of each document instead of the start of the row.
        layout_for: returns the layout of a batch, such as a balanced one, from its `documents`. The layout must have
            the length and shards of `layout` and be the same on all ranks. `layout_for` and `packing` may run in the
            prefetching thread and must not call collectives.
        plan: function that is called with each batch, in the thread that makes it, for example to plan the attention of
            the batch before its step begins (`attend.plan_ahead`).
        ahead: number of batches to prefetch.

    Raises:
        ValueError: a shard or replica out of range, rows_per_batch or replicas below 1, ahead below 0, no stores, one
            without tokens, different tokenizers, weights that are not one number above 0 for each store, or a packing
            without a name or one whose rows are empty or longer than N.
    """

    def __init__(
        self,
        stores: TokenStore | Sequence[TokenStore],
        *,
        layout: SequenceLayout,
        shard: int,
        rows_per_batch: int,
        packing: Packing = greedy,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        replica: int = 0,
        replicas: int = 1,
        reset_positions: bool = False,
        layout_for: Callable[[Documents], SequenceLayout] | None = None,
        plan: Callable[[Batch], None] | None = None,
        ahead: int = 2,
    ) -> None:
        stores = [stores] if isinstance(stores, TokenStore) else list(stores)
        check_vocabularies(stores)
        packing_name = getattr(packing, "__name__", "<none>")
        if not packing_name.isidentifier():
            raise ValueError(f"packing {packing} has no name to save in a state; give a function defined by def")
        self._layout_for, self._plan, self._reset_positions = layout_for, plan, reset_positions
        self._epochs = [
            Epochs(store, layout.length, packing, f"store {i}, seed {seed}") for i, store in enumerate(stores)
        ]
        # Exact fractions, so that the order of a mixture does not depend on rounding.
        proportions = [epochs.rows for epochs in self._epochs] if weights is None else list(weights)
        if len(proportions) != len(stores) or not all(0 < weight < float("inf") for weight in proportions):
            raise ValueError(f"weights {weights}: give one above 0 for each of the {len(stores)} stores")
        self._weights = [Fraction(weight) / sum(map(Fraction, proportions)) for weight in proportions]
        settings = {
            "version": ORDER_VERSION,
            "stores": [store.content for store in stores],
            "weights": [str(weight) for weight in self._weights],
            "sequence_length": layout.length,
            "packing": packing_name,
            "seed": seed,
        }
        super().__init__(layout, shard, rows_per_batch, replica, replicas, ahead, settings)

    @property
    def rows_per_epoch(self) -> int:
        """Rows, over all replicas, after which every document of every store has been read at least once."""
        # `source_at` sorts the rows of all stores by a key: row i of a store has the key (i + 1/2) / weight. The last
        # row of a store's first epoch is row `epochs.rows - 1`.
        last_key = max(
            (epochs.rows - Fraction(1, 2)) / weight for epochs, weight in zip(self._epochs, self._weights, strict=True)
        )
        return sum(items_until(last_key, self._weights))

    def waste(self) -> list[Waste]:
        """Returns the cost of the packing in an epoch of each store."""
        return [epochs.waste() for epochs in self._epochs]

    def row(self, number: int) -> PackedRow:
        """Returns row `number`, counted over all epochs, stores and replicas."""
        source, store_row = source_at(number, self._weights)
        return self._epochs[source].row(store_row)

    def describe(self, row: int) -> str:
        packed_row = self.row(row)
        # Token indices count over the store's files. Document numbers would be ambiguous: a selection of documents,
        # such as a split, numbers them from 0 again.
        ranges: list[str] = []
        for piece in packed_row.pieces:
            start = int(packed_row.store.starts[piece.document]) + piece.start
            ranges.append(f"{start}..{start + piece.length - 1}")
        suffix = f" and {len(ranges) - 8} more parts" if len(ranges) > 8 else ""
        return f"{packed_row.store.name}, tokens {', '.join(ranges[:8])}{suffix}"

    def _make_batch(self, rows: range) -> Batch:
        packed_rows = [self.row(number) for number in rows]
        documents = tuple(row.ends for row in packed_rows)
        layout = self._layout
        if self._layout_for is not None:
            layout = self._layout_for(documents)
            if (layout.length, layout.shards) != (self._layout.length, self._layout.shards):
                raise ValueError(
                    f"layout_for gave {layout}, not {self._layout.shards} shards of {self._layout.length} tokens in all"
                )
        positions = self._positions if layout is self._layout else layout.positions(self._shard)
        shape = len(packed_rows), layout.sizes[self._shard]
        tokens, next_tokens, starts = (np.zeros(shape, np.int64) for _ in range(3))
        for i, row in enumerate(packed_rows):
            row_starts = starts[i] if self._reset_positions else None
            read_shard(row, layout.spans(self._shard), tokens[i], next_tokens[i], row_starts)
        # A new tensor even without resets, so that a caller who writes to a batch does not change later ones.
        positions = positions - torch.from_numpy(starts)
        batch = Batch(torch.from_numpy(tokens), torch.from_numpy(next_tokens), positions, documents, layout, rows)
        if self._plan is not None:
            self._plan(batch)
        return batch


def check_length(stores: Sequence[TokenStore], length: int) -> None:
    """Raises ValueError if a row of `length` tokens is longer than all stores together."""
    tokens = sum(store.tokens for store in stores)
    if length > tokens:
        names = ", ".join(store.name for store in stores)
        raise ValueError(f"rows of {length:,} tokens: {names} have {tokens:,} in all; give at most as many")


def check_vocabularies(stores: Sequence[TokenStore]) -> None:
    if not stores:
        raise ValueError("there are no stores to pack; give at least one")
    stores_with_tokenizer = [store for store in stores if store.vocabulary.tokenizer is not None]
    for store in stores_with_tokenizer[1:]:
        if store.vocabulary != stores_with_tokenizer[0].vocabulary:
            raise ValueError(
                f"{store.name} has tokens of {store.vocabulary.tokenizer}, {stores_with_tokenizer[0].name} of "
                f"{stores_with_tokenizer[0].vocabulary.tokenizer}; mixed stores need one tokenizer"
            )


# -- rows of one store ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PackedRow:
    """A row of N tokens as pieces of documents, before tokens are read.

    Args:
        pieces: pieces of documents of `store`, in order.
        ends: boundaries of the pieces in the row: 0, end of the first, ..., N. Padding counts as one more piece.
    """

    store: TokenStore
    pieces: list[DocumentPiece]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Waste:
    """Cost of a packing in one epoch.

    Args:
        rows: number of rows, of N tokens each.
        padding: fraction of the rows' tokens that are padding.
        dropped: fraction of the store's tokens that are in no row.
        cut: fraction of the documents that no row contains completely.
    """

    rows: int
    padding: float
    dropped: float
    cut: float


class Epochs:
    """The rows of a store, numbered over all epochs. An epoch shuffles the documents, packs them and shuffles the rows.

    Args:
        length: tokens of a row, N.
        key: key of all shuffles, which contains the seed.
    """

    def __init__(self, store: TokenStore, length: int, packing: Packing, key: str) -> None:
        self._store, self._length, self._packing, self._key = store, length, packing, key
        self._documents = np.flatnonzero(store.lengths)
        self._sizes = store.lengths[self._documents]
        if not len(self._documents):
            raise ValueError(f"{store.name} has no tokens; give a store with at least one document")
        # Two epochs: at the end of an epoch the prefetching thread already reads rows of the next one.
        self._packed = lru_cache(maxsize=2)(self._pack)
        self._lock = Lock()
        self.rows = len(self._epoch(0)[0])
        """Rows of each epoch."""

    def row(self, number: int) -> PackedRow:
        epoch, index = divmod(number, self.rows)
        packed_rows, order = self._epoch(epoch)
        # The packing counts only documents with tokens.
        pieces = [
            DocumentPiece(int(self._documents[piece.document]), piece.start, piece.length)
            for piece in packed_rows.row(int(order[index]))
        ]
        ends = tuple(accumulate((piece.length for piece in pieces), initial=0))
        return PackedRow(self._store, pieces, ends if ends[-1] == self._length else (*ends, self._length))

    def waste(self) -> Waste:
        packed_rows, sizes = self._epoch(0)[0], self._sizes
        packed_tokens = int(packed_rows.lengths.sum())
        uncut = int((packed_rows.lengths == sizes[packed_rows.documents]).sum())  # pieces that are full documents
        return Waste(
            rows=len(packed_rows),
            padding=1 - packed_tokens / (len(packed_rows) * self._length),
            dropped=1 - packed_tokens / int(sizes.sum()),
            cut=1 - uncut / len(sizes),
        )

    def _epoch(self, number: int) -> tuple[Packed, Index]:
        """Returns the rows of an epoch and the order in which they are read."""
        with self._lock:  # a second thread waits, instead of packing the same epoch again
            return self._packed(number)

    def _pack(self, epoch: int) -> tuple[Packed, Index]:
        key = f"{self._key}, epoch {epoch}"
        packed_rows = self._packing(self._sizes, self._length, f"documents of {key}")
        # `row` derives the epoch from the number of a row, so every epoch must have the same number of rows.
        if epoch and len(packed_rows) != self.rows:
            raise ValueError(f"the packing made {len(packed_rows)} rows of epoch {epoch}, but {self.rows} of epoch 0")
        # A packing may be a user's function, so its rows are checked. `tokens_before` has a total for each piece and
        # one for the end; their differences at first pieces are the tokens of each row.
        tokens_before = np.concatenate([[0], np.cumsum(packed_rows.lengths)])
        sizes = np.diff(tokens_before[packed_rows.first])
        if sizes.min() < 1 or sizes.max() > self._length:
            row = int(np.argmax((sizes < 1) | (sizes > self._length)))
            raise ValueError(f"the packing put {sizes[row]} tokens into row {row}, not 1 to {self._length}")
        return packed_rows, permutation(len(packed_rows), f"rows of {key}")


def read_shard(row: PackedRow, spans: Spans, tokens: Index, labels: Index, starts: Index | None = None) -> None:
    """Reads the tokens at positions `spans` of a row, and their labels, into the caller's arrays int64 [T].

    Args:
        starts: int64 [T], receives the position in the row of the first token of each token's piece, from which
            `reset_positions` counts. None if positions are not reset.
    """
    store, offset = row.store, 0  # `offset` tokens of the shard are read so far
    for span in spans:
        while span:
            # 1. The positions of the span that lie in one piece; their number is rounded up because span[0] counts too.
            number = bisect_right(row.ends, span[0]) - 1
            count = -(-(row.ends[number + 1] - span[0]) // span.step)
            positions, span = span[:count], span[count:]
            target = slice(offset, offset + len(positions))
            offset = target.stop
            if starts is not None:
                starts[target] = row.ends[number]
            if number == len(row.pieces):  # padding counts as one more piece
                tokens[target], labels[target] = store.vocabulary.end_of_document or 0, IGNORE  # 0 if it is unknown
                continue
            # 2. Their token indices in the document of the piece. The last token of a document has no label.
            piece = row.pieces[number]
            shift = piece.start - row.ends[number]
            start, stop = positions[0] + shift, positions[-1] + shift + 1
            label_stop = min(stop + 1, int(store.stops[piece.document] - store.starts[piece.document]))
            # 3. One read serves tokens and labels, except with a step, where the next token of a token is not the
            # shard's next token, and in stores with labels of their own.
            if positions.step == 1 and store.labels is None:
                window = store.read(piece.document, start, label_stop)
                tokens[target], next_tokens = window[: len(positions)], window[1:]
            else:
                tokens[target] = store.read(piece.document, start, stop, positions.step)
                next_tokens = store.read_labels(piece.document, start + 1, label_stop, positions.step)
            unlabelled = target.start + len(next_tokens)
            labels[target.start : unlabelled], labels[unlabelled : target.stop] = next_tokens, IGNORE


# -- mixtures of stores -----------------------------------------------------------------------------------------------


def source_at(index: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Returns (source of item `index` of a weighted mixture, number of that source's earlier items)."""
    # Item k of source s, counted from 0, has the sort key (k + 1/2) / weights[s], and the mixture has the items of all
    # sources in the order of their keys. So the number of items of a source among the first n differs from its
    # proportion of n by at most 1 with up to three of S sources, and by at most S / 2 with more.
    # Source s has about weights[s] * key + 1/2 items with sort keys up to `key`. The sum of these numbers over all
    # sources is `index` for the key below. `items_until` rounds each number down, so the counts add up to at most
    # `index`; the loop adds the few items that are missing.
    key = (index - Fraction(len(weights), 2)) / sum(weights)
    counts = items_until(key, weights)
    while True:
        # The next item is from the source whose next item has the smallest key; of several, from the first source.
        source = min(range(len(weights)), key=lambda s: ((counts[s] + Fraction(1, 2)) / weights[s], s))
        if sum(counts) == index:
            return source, counts[source]
        counts[source] += 1


def items_until(last_key: Fraction, weights: Sequence[Fraction]) -> list[int]:
    """Returns the number of items of each source whose sort key, as in `source_at`, is at most `last_key`."""
    return [max(0, int(weight * last_key + Fraction(1, 2))) for weight in weights]
