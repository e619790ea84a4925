"""Prefix trees of token sequences, such as rollouts of a prompt: beginnings that sequences share are stored once.

`prefix_tree` builds a tree, `tree_batch` makes a rank's shard of rows of trees. Loss and gradients are those of the
separate sequences: a token attends to the tokens of its path from the root, and its position counts along the path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from armillary.core import LabelTriples, Segments, SequenceLayout
from armillary.core.internal import MISSING, path_depths
from armillary.data.loader.batches import Batch
from armillary.data.store import Index

Ints = Sequence[int] | Tensor | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Segments of tokens in depth-first order. A sequence is the path from a root to one of them.

    `AttentionMask.tree(tree.ends, tree.parents)` is the mask of the tree.

    Args:
        tokens: int64 [N].
        ends: boundaries of the S segments: 0, end of the first, ..., N.
        parents: index of each segment's parent, or -1.
        weights: float64 [S], weight of a segment's tokens as labels: the sum of the weights of all sequences that have
            the segment and train on it; 0 if its tokens are no labels.
        last_segments: for each sequence, in the order of the arguments, the segment that it ends with.
    """

    tokens: Index
    ends: tuple[int, ...]
    parents: tuple[int, ...]
    weights: npt.NDArray[np.float64]
    last_segments: tuple[int, ...]


def prefix_tree(
    sequences: Sequence[Ints], *, trained: Sequence[Any] | None = None, weights: Sequence[float] | None = None
) -> PrefixTree:
    """Builds the prefix tree of token sequences. Equal sequences become one, with the sum of their weights.

    Args:
        sequences: token ids [n] each, such as a prompt and a completion.
        trained: for each sequence one boolean per token, True if the token is a label; by default all are. The first
            token of a sequence has no token before it that could predict it, and is never a label.
        weights: weight of each sequence; 1 by default.

    Raises:
        ValueError: no sequences, or an empty one; `trained` or `weights` of other lengths; a weight that is not a
            finite number of at least 0.
    """
    ids = [np.asarray(sequence, np.int64) for sequence in sequences]
    masks = [np.ones(len(s), np.bool_) for s in ids] if trained is None else [np.asarray(t, np.bool_) for t in trained]
    scales = [1.0] * len(ids) if weights is None else [float(weight) for weight in weights]
    if not ids or any(s.ndim != 1 or not len(s) for s in ids):
        raise ValueError(f"sequences of shapes {[s.shape for s in ids]}: give one or more, of one or more tokens each")
    if [t.shape for t in masks] != [s.shape for s in ids] or len(scales) != len(ids):
        sizes = f"trained of shapes {[t.shape for t in masks]}, {len(scales)} weights"
        raise ValueError(f"{sizes}: sequences have shapes {[s.shape for s in ids]}")
    if not all(isfinite(scale) and scale >= 0 for scale in scales):
        raise ValueError(f"weights {scales}: each must be finite and at least 0")

    pieces, parents, label_weights, last_segments = list[Index](), list[int](), list[float](), [MISSING] * len(ids)

    def branches(members: Sequence[int], start: int, parent: int) -> list[tuple[list[int], int, int]]:
        """Groups the sequences that have a token `start` by that token, in the order of the arguments."""
        groups: dict[int, list[int]] = {}
        for i in members:
            if start < len(ids[i]):
                groups.setdefault(int(ids[i][start]), []).append(i)
        return [(group, start, parent) for group in groups.values()]

    # Each entry becomes a segment: sequences that share their first `start` tokens and the next one. The last entry is
    # taken first, so that segments come depth first, and branches are pushed in reverse.
    stack = branches(range(len(ids)), 0, MISSING)[::-1]
    while stack:
        members, start, parent = stack.pop()
        # 1. The segment ends where the members' tokens differ or the shortest one ends, or where labels begin or end.
        first, stop = ids[members[0]], min(len(ids[i]) for i in members)
        for i in members[1:]:
            differing = np.flatnonzero(ids[i][start:stop] != first[start:stop])
            stop = start + int(differing[0]) if len(differing) else stop
        token_weights = np.sum([scales[i] * masks[i][start:stop] for i in members], axis=0)
        changes = np.flatnonzero(np.diff(token_weights))
        stop = start + int(changes[0]) + 1 if len(changes) else stop
        # 2. Sequences that end here end with this segment; the others continue in its children.
        segment = len(parents)
        pieces.append(first[start:stop])
        parents.append(parent)
        label_weights.append(float(token_weights[0]))
        for i in members:
            if len(ids[i]) == stop:
                last_segments[i] = segment
        stack += branches(members, stop, segment)[::-1]
    ends = tuple(np.cumsum([0, *map(len, pieces)]).tolist())
    return PrefixTree(np.concatenate(pieces), ends, tuple(parents), np.array(label_weights), tuple(last_segments))


def tree_batch(trees: Sequence[PrefixTree], layout: SequenceLayout, shard: int = 0, *, padding: int = 0) -> Batch:
    """Returns one rank's shard of a batch of trees, one per row. No communication.

    Labels are `LabelTriples`: the last token of a segment predicts the first token of each of its children.

    Args:
        layout: layout of the rows' `layout.length` tokens.
        shard: this rank's shard of the layout.
        padding: token at the end of rows whose tree is shorter; it is a segment of its own, without labels.

    Raises:
        ValueError: no trees, or one that is longer than a row.
    """
    length, positions = layout.length, layout.positions(shard).numpy()
    if not trees or max(len(tree.tokens) for tree in trees) > length:
        sizes = [len(tree.tokens) for tree in trees]
        raise ValueError(f"trees of {sizes} tokens: give one or more, of at most {length}, with fewer sequences each")
    local = np.full(length, MISSING)  # index of each position among this rank's tokens; MISSING on other ranks
    local[positions] = np.arange(len(positions))
    rows, tokens, depths, triples = list[Segments](), list[Index](), list[Index](), list[npt.NDArray[Any]]()
    for i, tree in enumerate(trees):
        # 1. The row: the tree, and a segment of padding.
        size, is_short = len(tree.tokens), len(tree.tokens) < length
        row = Segments(tree.ends + (length,) * is_short, tree.parents + (MISSING,) * is_short)
        sizes, row_tokens = np.diff(row.ends), np.concatenate([tree.tokens, np.full(length - size, padding)])
        # 2. A token's position is its number of tokens before it on its path.
        starts: Index = np.array(row.ends[:-1]) - np.array(path_depths(row.parents, sizes.tolist()))
        rows.append(row)
        tokens.append(row_tokens[positions])
        depths.append((np.arange(length) - np.repeat(starts, sizes))[positions])
        # 3. A label belongs to the rank of the token before it on its path, which predicts it.
        weights = np.repeat(np.append(tree.weights, 0.0)[: len(sizes)], sizes)
        predictors = row.ancestors(np.arange(length), 1)
        labels = np.flatnonzero((weights > 0) & (predictors != MISSING) & (local[predictors] != MISSING))
        indices = i * len(positions) + local[predictors[labels]]
        triples.append(np.stack([indices, row_tokens[labels], weights[labels]]))
    indices, labels, weights = (torch.from_numpy(column) for column in np.concatenate(triples, axis=1))
    return Batch(
        torch.from_numpy(np.stack(tokens)),
        LabelTriples(indices.long(), labels.long(), weights, (len(trees), len(positions))),
        torch.from_numpy(np.stack(depths)),
        tuple(row.ends for row in rows),
        layout,
        parents=tuple(row.parents for row in rows),
    )
