"""Rows of N tokens packed from documents, of which each rank reads only the tokens that it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import cast

import numpy as np
import torch

from armillary.core import SequenceLayout
from armillary.data.loader.batch import Batch, Documents, Parents
from armillary.data.loader.batches import Batches
from armillary.data.loader.epochs import Epochs, PackedRow, Waste, read_shard
from armillary.data.loader.tree_rows import RowLabels, TreeEpochs, TreeRow, parents_of, triples_of
from armillary.data.packing import Packing, greedy
from armillary.data.shuffle import interleaved, turns_until
from armillary.data.store import TokenStore

ORDER = 1
"""Changes when the same stores, weights, N, packing and seed come to give other rows."""


class PackedSequences(Batches):
    """Batches of rows of exactly N tokens, packed from one or several stores; this rank's shard of them.

    Where a store has trees, labels are `LabelTriples` in all batches, documents weigh 1, and positions in rows of trees
    are counted along the path from the tree's first token. Trees are never cut: one that is longer than a row becomes
    several, each with as many sequences as fit, and what these share is repeated.

    An epoch reads every document once, shuffled and packed anew. Several stores are mixed row by row, each by its
    weight and in epochs of its own. Which tokens stand in row r of all rows ever read depends on the stores, N, the
    packing, the weights and the seed alone, so those must be the same on all ranks; layouts and the number of ranks
    only change which rank holds what. A rank reads the tokens of its shard, and one more for the label of each span's
    last (for spans with a step, two for each token): 2 to 4 bytes a token. Nothing is communicated. An epoch's packing
    takes 24 bytes of memory a document.

    Iterating goes on from where it was, or from where `load_state_dict` said. `batch` gives any step's batch.

    Args:
        stores: of the same tokenizer.
        layout: cuts rows of `layout.length` tokens, N, into shards.
        shard: the shard of the layout that this rank holds.
        rows_per_batch: rows of one replica's batch, B.
        weights: the share of rows that each store gets; by default as many as its epochs have, so that all stores come
            to their ends together.
        replica, replicas: this rank reads part `replica` of each global batch of rows_per_batch * replicas rows. Ranks
            that hold shards of the same rows have the same `replica`.
        packing: a function; its name is part of the state. For trees best_fit or one_per_row.
        reset_positions: count positions from the start of each piece of a document in the row, not of the row.
        layout_for: chooses the layout of a batch by its `documents`, such as a balanced one, with N and shards as in
            `layout`; it must choose the same on all ranks. Where any store has trees, it is called with the batch's
            `parents` too. Called in a thread, as `packing` is: no collectives there.
        ahead: batches that a thread makes before they are asked for.

    Raises:
        ValueError: no such shard or replica, rows_per_batch or replicas below 1, ahead below 0, no documents, other
            tokenizers, weights that are not above 0 or not one for each store.
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
        layout_for: Callable[..., SequenceLayout] | None = None,
        ahead: int = 2,
    ) -> None:
        self._stores = [stores] if isinstance(stores, TokenStore) else list(stores)
        check_vocabularies(self._stores)
        name = _name_of(packing)
        self._layout_for, self._reset_positions = layout_for, reset_positions
        keys = [f"store {i}, seed {seed}" for i in range(len(self._stores))]
        self._has_trees = any(store.trees is not None for store in self._stores)
        kinds = [Epochs if store.trees is None else TreeEpochs for store in self._stores]
        given = zip(kinds, self._stores, keys, strict=True)
        self._epochs = [kind(store, layout.length, packing, key) for kind, store, key in given]
        self._weights = _fractions(weights, [epochs.rows for epochs in self._epochs])
        settings = {
            "version": ORDER,
            "stores": [store.content for store in self._stores],
            "weights": [str(weight) for weight in self._weights],
            "sequence_length": layout.length,
            "packing": name,
            "seed": seed,
        }
        super().__init__(layout, shard, rows_per_batch, replica, replicas, ahead, settings)

    # -- how much there is ----------------------------------------------------------------------------------------

    @property
    def rows_per_epoch(self) -> int:
        """Rows in which every document of every store is read at least once, all replicas together."""
        last = max((epochs.rows - Fraction(1, 2)) / w for epochs, w in zip(self._epochs, self._weights, strict=True))
        return sum(turns_until(last, self._weights))

    def waste(self) -> list[Waste]:
        """What the packing costs in an epoch of each store."""
        return [epochs.waste() for epochs in self._epochs]

    # -- batches --------------------------------------------------------------------------------------------------

    def _make_batch(self, rows: range) -> Batch:
        made = [self.row(number) for number in rows]
        documents, parents = tuple(row.ends for row in made), parents_of(made) if self._has_trees else None
        layout = self._layout if self._layout_for is None else self._chosen_layout(documents, parents)
        shape = len(made), layout.sizes[self._shard]
        tokens, labels = np.empty(shape, np.int64), np.empty(shape, np.int64)
        starts = np.zeros(shape, np.int64) if self._reset_positions or self._has_trees else None
        for i, row in enumerate(made):
            counted = self._reset_positions or isinstance(row, TreeRow)
            own = starts[i] if starts is not None and counted else None
            read_shard(row, layout.spans(self._shard), tokens[i], labels[i], own)
        positions = self._positions if layout is self._layout else layout.positions(self._shard)
        # Copies: whoever changes a batch in place must not change what is read next.
        own = positions.repeat(len(made), 1) if starts is None else positions - torch.from_numpy(starts)
        found = torch.from_numpy(labels)
        if self._has_trees:
            each = zip(made, labels, strict=True)
            found = triples_of([RowLabels.of(row, positions.numpy(), of_row) for row, of_row in each], shape[1])
        return Batch(torch.from_numpy(tokens), found, own, documents, layout, rows, parents)

    def _chosen_layout(self, documents: Documents, parents: Parents | None) -> SequenceLayout:
        given = (documents,) if parents is None else (documents, parents)
        layout, asked = cast(Callable[..., SequenceLayout], self._layout_for)(*given), self._layout
        if (layout.length, layout.shards) != (asked.length, asked.shards):
            raise ValueError(f"layout_for gave {layout}, not {asked.shards} shards of {asked.length} tokens in all")
        return layout

    def row(self, number: int) -> PackedRow:
        """What row `number` of all rows is made of."""
        source, turn = interleaved(number, self._weights)
        return self._epochs[source].row(turn)

    def describe(self, row: int) -> str:
        made = self.row(row)
        # Not by documents' numbers: those of a part of a store are not those in its files.
        begins = [int(made.store.starts[piece.document]) + piece.start for piece in made.slices]
        parts = [f"{at}..{at + piece.length - 1}" for at, piece in zip(begins, made.slices, strict=True)]
        more = f" and {len(parts) - 8} more parts" if len(parts) > 8 else ""
        return f"{made.store.name}, tokens {', '.join(parts[:8])}{more}"


def check_length(stores: Sequence[TokenStore], length: int) -> None:
    """Refuses rows that are longer than all documents together: there would be more padding than text.

    Raises:
        ValueError: names the tokens that there are.
    """
    tokens = sum(store.tokens for store in stores)
    if length > tokens:
        names = ", ".join(store.name for store in stores)
        raise ValueError(f"rows of {length:,} tokens: {names} have {tokens:,} in all; give at most as many")


def check_vocabularies(stores: Sequence[TokenStore]) -> None:
    """Refuses no stores, and stores whose tokens mean different things, as far as their files say."""
    if not stores:
        raise ValueError("there are no stores to pack; give at least one")
    known = [store for store in stores if store.vocabulary.tokenizer is not None]
    for store in known[1:]:
        if store.vocabulary != known[0].vocabulary:
            raise ValueError(
                f"{store.name} holds tokens of {store.vocabulary.tokenizer}, {known[0].name} of "
                f"{known[0].vocabulary.tokenizer}; stores that are mixed must be prepared with one tokenizer"
            )


def _fractions(weights: Sequence[float] | None, rows: list[int]) -> list[Fraction]:
    chosen = rows if weights is None else list(weights)
    if len(chosen) != len(rows) or not all(0 < weight < float("inf") for weight in chosen):
        raise ValueError(f"weights {weights}: give one above 0 for each of the {len(rows)} stores")
    return [Fraction(weight) / sum(map(Fraction, chosen)) for weight in chosen]


def _name_of(packing: Packing) -> str:
    name = getattr(packing, "__name__", "<none>")
    if not name.isidentifier():
        raise ValueError(f"packing {packing} has no name that a state could be told by; give a function made with def")
    return name
