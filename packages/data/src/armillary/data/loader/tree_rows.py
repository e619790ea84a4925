"""Rows of trees: which trees make up a row, and what the tokens that a shard holds of it are to predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from armillary.core.labels import LabelTriples
from armillary.core.slices import Slices, slice_array
from armillary.data.loader.batch import IGNORE
from armillary.data.loader.epochs import Epochs, PackedRow, Waste
from armillary.data.packing import DocumentSlice, Packed, Packing, greedy
from armillary.data.shuffle import Index
from armillary.data.store import TokenStore
from armillary.data.trees import SegmentTree

Weights = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class VisibleSegments:
    """A token sees its own segment, up to itself, and those that this follows."""

    ends: Sequence[int]
    parents: Sequence[int]

    def slices(self, length: int) -> list[Slices]:
        """One for each segment, which is seen from its start to the end of all that follows it (`core.slices`)."""
        last = list(range(len(self.parents)))
        for s in range(len(last) - 1, 0, -1):
            if (parent := self.parents[s]) >= 0:
                last[parent] = max(last[parent], last[s])
        pieces = zip(self.ends[:-1], self.ends[1:], last, strict=True)
        return [slice_array((start, self.ends[s + 1], start, stop, None, 0) for start, stop, s in pieces)]


@dataclass(frozen=True, eq=False)
class TreeRow(PackedRow):
    """A row of trees; its slices are their segments, depth first.

    Args:
        parents: the segment that each piece follows, counted over the row; -1 for roots and padding.
        weights: float64, of labels among the tokens of each piece.
        depths: tokens before each piece on its path.
    """

    parents: tuple[int, ...]
    weights: Weights
    depths: tuple[int, ...]

    @classmethod
    def of(cls, store: TokenStore, trees: Sequence[tuple[int, SegmentTree]], length: int) -> TreeRow:
        """Trees, each of a document, one after the other, and padding up to `length`."""
        slices, parents, depths = list[DocumentSlice](), list[int](), list[int]()
        for document, tree in trees:
            parents += [parent + len(slices) if parent >= 0 else -1 for parent in tree.parents]
            depths += tree.depths
            pieces = zip(tree.starts.tolist(), tree.lengths.tolist(), strict=True)
            slices += [DocumentSlice(document, start, size) for start, size in pieces]
        ends = tuple(accumulate((piece.length for piece in slices), initial=0))
        weights = [tree.label_weights for _, tree in trees]
        if ends[-1] < length:
            ends, parents, depths, weights = (*ends, length), [*parents, -1], [*depths, 0], [*weights, np.zeros(1)]
        return cls(store, slices, ends, tuple(parents), np.concatenate(weights), tuple(depths))

    @property
    def visible(self) -> VisibleSegments:
        """Who sees whom, as balanced layouts take it for a mask."""
        return VisibleSegments(self.ends, self.parents)

    @property
    def origins(self) -> Sequence[int]:
        return [end - depth for end, depth in zip(self.ends[:-1], self.depths, strict=True)]


class TreeEpochs(Epochs):
    """As `Epochs`, of a store of trees. One that is longer than a row becomes several (`SegmentTree.fitted`).

    Raises:
        ValueError: a packing that cuts documents, or nothing that has a place in a row.
    """

    def __init__(self, store: TokenStore, length: int, packing: Packing, key: str) -> None:
        if packing is greedy:
            raise ValueError(
                f"{store.name} holds trees, and packing greedy cuts documents; use best_fit or one_per_row"
            )
        self._whole = np.flatnonzero((store.lengths > 0) & (store.lengths <= length))
        longer = np.flatnonzero(store.lengths > length).tolist()
        self._fitted = [(document, part) for document in longer for part in store.tree(document).fitted(length)]
        self._longer = len(longer)
        super().__init__(store, length, packing, key)

    def _items(self) -> tuple[Index, Index]:
        documents = np.array([document for document, _ in self._fitted], np.int64)
        sizes = np.array([part.tokens for _, part in self._fitted], np.int64)
        return (
            np.concatenate([self._whole, documents]),
            np.concatenate([self._store.lengths[self._whole], sizes]),
        )

    def _row_of(self, pieces: Sequence[DocumentSlice]) -> TreeRow:
        return TreeRow.of(self._store, [self._tree(piece.document) for piece in pieces], self._length)

    def _tree(self, item: int) -> tuple[int, SegmentTree]:
        """Which document it is of, and which of its trees."""
        if item >= len(self._whole):
            return self._fitted[item - len(self._whole)]
        document = int(self._whole[item])
        return document, self._store.tree(document)

    def waste(self) -> Waste:
        """As for documents. Tokens that several rows repeat are no padding, and dropped those that are in none."""
        packed = self._epoch(0)[0]
        held = int(self._store.lengths[self._whole].sum()) + self._held_of_longer()
        padding = 1 - int(packed.lengths.sum()) / (len(packed) * self._length)
        documents = len(self._whole) + self._longer
        return Waste(len(packed), padding, 1 - held / self._store.tokens, self._longer / documents)

    def _held_of_longer(self) -> int:
        """Tokens of trees longer than a row that are in some row."""
        most: dict[tuple[int, int], int] = {}
        for document, part in self._fitted:
            for start, size in zip(part.starts.tolist(), part.lengths.tolist(), strict=True):
                most[document, start] = max(size, most.get((document, start), 0))
        return sum(most.values())

    def _pack(self, epoch: int) -> tuple[Packed, Index]:
        packed, order = super()._pack(epoch)
        if packed.starts.any() or (packed.lengths != self._sizes[packed.documents]).any():
            raise ValueError(f"{self._store.name} holds trees, and the packing cuts documents; use one that cuts none")
        return packed, order


@dataclass(frozen=True, eq=False)
class RowLabels:
    """The labels of T tokens of a row: places 0..T-1, labels and weights, [M] each."""

    places: Index
    labels: Index
    weights: Weights

    @classmethod
    def of(cls, row: PackedRow, positions: Index, labels: Index) -> RowLabels:
        """Of the tokens at these positions [T] of a row.

        Args:
            labels: int64 [T], the tokens that follow in the documents, or `IGNORE`, as `read_shard` has them.
        """
        if not isinstance(row, TreeRow):
            places = np.flatnonzero(labels != IGNORE)
            return cls(places, labels[places], np.ones(len(places)))
        ends = np.array(row.ends)
        piece = np.searchsorted(ends, positions, "right") - 1
        last = positions + 1 == ends[piece + 1]
        inner = np.flatnonzero((labels != IGNORE) & ~last & (row.weights[piece] > 0))
        place_of = dict(zip(piece[last].tolist(), np.flatnonzero(last).tolist(), strict=True))
        places, firsts, weights = first_tokens(row, place_of)
        return cls(
            np.concatenate([inner, places]),
            np.concatenate([labels[inner], firsts]),
            np.concatenate([row.weights[piece[inner]], weights]),
        )


def first_tokens(row: TreeRow, place_of: dict[int, int]) -> tuple[Index, Index, Weights]:
    """The first tokens of segments as labels of the last tokens of those before them: places, labels and weights.

    Args:
        place_of: by segment, the place of its last token, where that is this shard's.
    """
    followed = [
        (place_of[parent], piece, weight)
        for parent, piece, weight in zip(row.parents, row.slices, row.weights.tolist(), strict=False)
        if parent in place_of and weight > 0
    ]
    tokens = [int(row.store.read(piece.document, piece.start, piece.start + 1)[0]) for _, piece, _ in followed]
    places, weights = [place for place, _, _ in followed], [weight for _, _, weight in followed]
    return np.array(places, np.int64), np.array(tokens, np.int64), np.array(weights, np.float64)


def triples_of(rows: Sequence[RowLabels], tokens: int) -> LabelTriples:
    """Those of a batch of rows with T `tokens` each."""
    places = [row.places + i * tokens for i, row in enumerate(rows)]
    labels, weights = [row.labels for row in rows], [row.weights for row in rows]
    positions, labels, weights = (torch.from_numpy(np.concatenate(column)) for column in (places, labels, weights))
    return LabelTriples(positions, labels, weights, (len(rows), tokens))


def parents_of(rows: Sequence[PackedRow]) -> tuple[tuple[int, ...], ...]:
    """By row, the segment that each piece follows; documents and padding follow none."""
    return tuple(row.parents if isinstance(row, TreeRow) else (-1,) * (len(row.ends) - 1) for row in rows)
