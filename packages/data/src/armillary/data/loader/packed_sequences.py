"""`PackedSequences`: batches of rows of N tokens packed from documents, of which each rank reads its own shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import torch

from armillary.core import SequenceLayout
from armillary.data.loader.batch import Batch, Documents
from armillary.data.loader.batches import Batches
from armillary.data.loader.epochs import Epochs, PackedRow, Waste, read_shard
from armillary.data.packing import Packing, greedy
from armillary.data.shuffle import items_until, source_at
from armillary.data.store import TokenStore

ORDER_VERSION = 1
"""Version of the order of rows, part of the state. It increases when a release makes different rows from the same
stores, weights, N, packing and seed, so that a state of an earlier release is refused."""


class PackedSequences(Batches):
    """Batches of rows of exactly N tokens, packed from one or several stores; each rank reads its own shard.

    An epoch packs every document once, in a new order. Several stores are mixed row by row, by weight, and
    each store starts its next epoch when its rows are used up. The tokens of row r depend only on the stores, N, the
    packing, the weights and the seed, which must be equal on all ranks; layouts and the number of ranks decide which
    rank holds which token.

    A rank reads each token of its shard once, in the store's dtype, and in each span one more token: the label of the
    span's last token. In spans with a step, and if the store has labels of its own, it reads the labels separately, so
    it reads twice as many values. No communication. The loader takes 16 bytes of memory per document, and
    a packed epoch 24 per piece of a document and 16 per row; two epochs are kept.

    A new iteration continues after the batch that was returned most recently, or from the loaded state. `batch` returns
    the batch of any step.

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
        layout = self._layout_of(documents)
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

    def _layout_of(self, documents: Documents) -> SequenceLayout:
        if self._layout_for is None:
            return self._layout
        layout = self._layout_for(documents)
        if (layout.length, layout.shards) != (self._layout.length, self._layout.shards):
            raise ValueError(
                f"layout_for gave {layout}, not {self._layout.shards} shards of {self._layout.length} tokens in all"
            )
        return layout


def check_length(stores: Sequence[TokenStore], length: int) -> None:
    """Raises ValueError if a row of `length` tokens is longer than all stores together."""
    tokens = sum(store.tokens for store in stores)
    if length > tokens:
        names = ", ".join(store.name for store in stores)
        raise ValueError(f"rows of {length:,} tokens: {names} have {tokens:,} in all; give at most as many")


def check_vocabularies(stores: Sequence[TokenStore]) -> None:
    """Raises ValueError for no stores, and for stores whose files name different vocabularies."""
    if not stores:
        raise ValueError("there are no stores to pack; give at least one")
    stores_with_tokenizer = [store for store in stores if store.vocabulary.tokenizer is not None]
    for store in stores_with_tokenizer[1:]:
        if store.vocabulary != stores_with_tokenizer[0].vocabulary:
            raise ValueError(
                f"{store.name} has tokens of {store.vocabulary.tokenizer}, {stores_with_tokenizer[0].name} of "
                f"{stores_with_tokenizer[0].vocabulary.tokenizer}; mixed stores need one tokenizer"
            )
