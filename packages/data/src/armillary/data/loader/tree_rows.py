"""Rows of trees: `TreeEpochs` packs the trees of a store into `TreeRow`s, `label_triples` returns a shard's labels.

A token of a tree may have several labels: the last token of a segment predicts the first token of each child segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from armillary.core import LabelTriples, Segments
from armillary.data.loader.batch import IGNORE
from armillary.data.loader.epochs import Epochs, PackedRow, Waste
from armillary.data.packing import DocumentPiece, Packed, Packing, greedy
from armillary.data.shuffle import Index
from armillary.data.store import TokenStore
from armillary.data.trees import SegmentTree

Weights = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TreeRow(PackedRow):
    """A row of trees. Its pieces are the trees' segments in depth-first order; padding counts as one more segment.

    Args:
        parents: for each segment the index of its parent among the row's segments; -1 for roots and padding.
        weights: float64 [S], weight of each label in a segment; 0 for padding.
        depths: number of tokens before each segment on its path.
    """

    parents: tuple[int, ...]
    weights: Weights
    depths: tuple[int, ...]

    @classmethod
    def of(cls, store: TokenStore, trees: Sequence[tuple[int, SegmentTree]], length: int) -> TreeRow:
        """Returns the row of these (document, tree) pairs in order, padded to `length`."""
        pieces, parents, depths = list[DocumentPiece](), list[int](), list[int]()
        for document, tree in trees:
            # Segments are numbered over the row: a tree's segment i is the row's segment len(pieces) + i.
            parents += [parent + len(pieces) if parent >= 0 else -1 for parent in tree.parents]
            depths += tree.depths
            segments = zip(tree.starts.tolist(), tree.lengths.tolist(), strict=True)
            pieces += [DocumentPiece(document, start, length) for start, length in segments]
        ends = tuple(accumulate((piece.length for piece in pieces), initial=0))
        weights = [tree.label_weights for _, tree in trees]
        if ends[-1] < length:  # padding
            ends, parents, depths, weights = (*ends, length), [*parents, -1], [*depths, 0], [*weights, np.zeros(1)]
        return cls(store, pieces, ends, tuple(parents), np.concatenate(weights), tuple(depths))

    @property
    def mask(self) -> Segments:
        """The mask of trees: a token sees the tokens of its path from the root up to itself."""
        return Segments(self.ends, self.parents)

    @property
    def origins(self) -> Sequence[int]:
        # The position of a segment's first token is the segment's depth.
        return [start - depth for start, depth in zip(self.ends[:-1], self.depths, strict=True)]


class TreeEpochs(Epochs):
    """Epochs of a store of trees. A tree longer than a row is split into several trees (`SegmentTree.split`).

    Items to pack are first the trees that fit into a row, then the trees into which `SegmentTree.split` splits the
    longer ones.

    Raises:
        ValueError: a packing that cuts documents, or a store without tokens.
    """

    def __init__(self, store: TokenStore, length: int, packing: Packing, key: str) -> None:
        if packing is greedy:
            raise ValueError(f"{store.name} has trees, and packing greedy cuts documents; use best_fit or one_per_row")
        long_documents = np.flatnonzero(store.lengths > length).tolist()
        # Set before the constructor of `Epochs`, which calls `_items`.
        self._split_trees = [
            (document, tree) for document in long_documents for tree in store.tree(document).split(length)
        ]
        super().__init__(store, length, packing, key)

    def _items(self) -> tuple[Index, Index]:
        lengths = self._store.lengths
        unsplit_documents = np.flatnonzero((lengths > 0) & (lengths <= self._length))
        split_documents = np.array([document for document, _ in self._split_trees], np.int64)
        split_sizes = np.array([tree.tokens for _, tree in self._split_trees], np.int64)
        documents = np.concatenate([unsplit_documents, split_documents])
        return documents, np.concatenate([lengths[unsplit_documents], split_sizes])

    def _row_of(self, pieces: Sequence[DocumentPiece]) -> TreeRow:
        unsplit_count = len(self._documents) - len(self._split_trees)
        trees: list[tuple[int, SegmentTree]] = []
        for item in (piece.document for piece in pieces):  # a piece is a complete item, as `_pack` has checked
            if item < unsplit_count:
                document = int(self._documents[item])
                trees.append((document, self._store.tree(document)))
            else:
                trees.append(self._split_trees[item - unsplit_count])
        return TreeRow.of(self._store, trees, self._length)

    def waste(self) -> Waste:
        """Returns the cost of the packing in the first epoch. Tokens of repeated segments do not count as padding."""
        packed_rows, lengths = self._epoch(0)[0], self._store.lengths
        # The trees into which one tree is split repeat segments. Each segment counts once, with the tokens of its
        # longest copy: copies of the last segment of a sequence may be truncated.
        segment_tokens: dict[tuple[int, int], int] = {}
        for document, tree in self._split_trees:
            for start, length in zip(tree.starts.tolist(), tree.lengths.tolist(), strict=True):
                segment_tokens[document, start] = max(length, segment_tokens.get((document, start), 0))
        packed_tokens = int(lengths[lengths <= self._length].sum()) + sum(segment_tokens.values())
        return Waste(
            rows=len(packed_rows),
            padding=1 - int(packed_rows.lengths.sum()) / (len(packed_rows) * self._length),
            dropped=1 - packed_tokens / self._store.tokens,
            cut=int((lengths > self._length).sum()) / int((lengths > 0).sum()),
        )

    def _pack(self, epoch: int) -> tuple[Packed, Index]:
        packed_rows, order = super()._pack(epoch)
        if packed_rows.starts.any() or (packed_rows.lengths != self._sizes[packed_rows.documents]).any():
            raise ValueError(f"{self._store.name} has trees, and the packing cuts documents; use one that cuts none")
        return packed_rows, order


def label_triples(rows: Sequence[PackedRow], positions: Index, next_tokens: Index) -> LabelTriples:
    """Returns the labels of one shard of a batch with rows of trees.

    Args:
        positions: int64 [T], positions of the shard's tokens in their row.
        next_tokens: int64 [B, T], the next token in each token's document, or `IGNORE`: the labels of `read_shard`.
    """
    indices, labels, weights = list[Index](), list[Index](), list[Weights]()
    for i, row in enumerate(rows):
        row_indices, row_labels, row_weights = _row_labels(row, positions, next_tokens[i])
        indices.append(i * len(positions) + row_indices)  # indices into the flattened batch [B T]
        labels.append(row_labels)
        weights.append(row_weights)
    return LabelTriples(
        torch.from_numpy(np.concatenate(indices)),
        torch.from_numpy(np.concatenate(labels)),
        torch.from_numpy(np.concatenate(weights)),
        next_tokens.shape,
    )


def _row_labels(row: PackedRow, positions: Index, next_tokens: Index) -> tuple[Index, Index, Weights]:
    """Returns the M labels of the shard's tokens in one row: (indices into `positions`, labels, weights), [M] each."""
    if not isinstance(row, TreeRow):  # a row of documents, in a mixture with trees
        indices = np.flatnonzero(next_tokens != IGNORE)
        return indices, next_tokens[indices], np.ones(len(indices))
    ends = np.array(row.ends)
    segment = np.searchsorted(ends, positions, "right") - 1
    is_last = positions + 1 == ends[segment + 1]
    # 1. Inside a segment the label of a token is the next token, with the weight of the segment.
    inner = np.flatnonzero((next_tokens != IGNORE) & ~is_last & (row.weights[segment] > 0))
    # 2. The last token of a segment has a label for each child: the child's first token, with the child's weight. The
    # child may be on another shard, so its first token is read from the store.
    last_token_of = dict(zip(segment[is_last].tolist(), np.flatnonzero(is_last).tolist(), strict=True))
    indices, labels, weights = list[int](), list[int](), list[float]()
    # The zip is not strict, because padding has a parent and a weight but no piece.
    for parent, child, weight in zip(row.parents, row.pieces, row.weights.tolist(), strict=False):
        if parent in last_token_of and weight > 0:
            indices.append(last_token_of[parent])
            labels.append(int(row.store.read(child.document, child.start, child.start + 1)[0]))
            weights.append(weight)
    return (
        np.concatenate([inner, np.array(indices, np.int64)]),
        np.concatenate([next_tokens[inner], np.array(labels, np.int64)]),
        np.concatenate([row.weights[segment[inner]], np.array(weights, np.float64)]),
    )


def parents_of(rows: Sequence[PackedRow]) -> tuple[tuple[int, ...], ...]:
    """Returns the parents of the segments in each row; -1 for documents and padding."""
    return tuple(row.parents if isinstance(row, TreeRow) else (-1,) * (len(row.ends) - 1) for row in rows)
