"""Prefix trees of token sequences: rows that contain shared beginnings once, with the labels of separate sequences."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.core import SequenceLayout
from armillary.core.internal import misplaced_segment
from armillary.data import LabelTriples, prefix_tree, tree_batch

SEQUENCES = [[1, 2, 3, 4, 9], [1, 2, 3, 5, 9], [1, 2, 3, 5, 9], [7, 8], [1, 2], [1, 2, 3, 5, 9, 9]]
TRAINED = [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 1, 0, 1], [0, 1], [1, 1], [0, 0, 1, 1, 1, 0]]
WEIGHTS = [1, 0.5, 1, 1, 2, 3]
LENGTH = 20


def expected(sequences, trained, weights):
    """Sums of weights over all sequences, by (tokens before a label, label)."""
    sums = {}
    for tokens, flags, weight in zip(sequences, trained, weights, strict=True):
        for i in range(1, len(tokens)):
            if flags[i] and weight:
                sums[tuple(tokens[: i + 1])] = sums.get(tuple(tokens[: i + 1]), 0) + weight
    return sums


def path_of(ends, parents, place):
    """Returns the places of a row that a place sees, in order."""
    piece = next(i for i, (a, b) in enumerate(pairwise(ends)) if a <= place < b)
    visible = list(range(ends[piece], place + 1))
    while (piece := parents[piece]) >= 0:
        visible = [*range(ends[piece], ends[piece + 1]), *visible]
    return visible


def actual_weights(batches, layout):
    """Returns the same sums as `expected` from the batches of all shards, and checks their positions."""
    sums, tokens = {}, layout.join([batch.tokens for batch in batches])
    positions = layout.join([batch.positions for batch in batches])
    for shard, batch in enumerate(batches):
        size, labels = batch.tokens.shape[1], batch.labels
        assert isinstance(labels, LabelTriples) and labels.shape == tuple(batch.tokens.shape)
        columns = labels.positions.tolist(), labels.labels.tolist(), labels.weights.tolist()
        for at, label, weight in zip(*columns, strict=True):
            i, place = at // size, int(layout.positions(shard)[at % size])
            path = path_of(batch.documents[i], batch.parents[i], place)
            assert positions[i, place] == len(path) - 1
            key = (*tokens[i, path].tolist(), label)
            sums[key] = sums.get(key, 0) + weight
    return sums


def whole(*trees, length=LENGTH, **options):
    return tree_batch(trees, SequenceLayout.contiguous(length, 1), **options)


def test_shared_beginnings_are_stored_once_depth_first_in_the_order_of_the_sequences():
    tree = prefix_tree(SEQUENCES, trained=TRAINED, weights=WEIGHTS)
    assert tree.tokens.tolist() == [1, 2, 3, 4, 9, 5, 9, 9, 7, 8]
    assert (tree.ends, tree.parents) == ((0, 2, 3, 5, 6, 7, 8, 9, 10), (-1, 0, 1, 1, 3, 4, -1, 6))
    assert tree.weights.tolist() == [2, 5.5, 1, 3.5, 4.5, 0, 0, 1]
    assert tree.last_segments == (2, 4, 4, 7, 0, 5)
    assert prefix_tree([torch.tensor([3, 4]), np.array([3], "uint16")]).ends == (0, 1, 2)


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


@given(sequences=sequences, data=st.data())
@settings(max_examples=60, deadline=None)
def test_trees_have_the_labels_of_all_sequences(sequences, data):
    trained = [data.draw(st.lists(st.booleans(), min_size=len(s), max_size=len(s))) for s in sequences]
    weights = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(sequences), max_size=len(sequences)))
    tree = prefix_tree(sequences, trained=trained, weights=weights)
    assert misplaced_segment(tree.parents) is None
    assert len(tree.tokens) == len({tuple(s[: i + 1]) for s in sequences for i in range(len(s))})
    for sequence, segment in zip(sequences, tree.last_segments, strict=True):
        path = path_of(tree.ends, tree.parents, tree.ends[segment + 1] - 1)
        assert tree.tokens[path].tolist() == sequence
    batch = whole(tree, length=48)
    assert actual_weights([batch], batch.layout) == pytest.approx(expected(sequences, trained, weights))


@pytest.mark.parametrize("kind", ["zigzag", "striped", "contiguous", "scattered"])
def test_shards_have_the_tokens_and_labels_of_their_positions(kind):
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0)).tolist()
    layout = (
        SequenceLayout([[range(p, p + 1) for p in order[shard::4]] for shard in range(4)])
        if kind == "scattered"
        else getattr(SequenceLayout, kind)(LENGTH, 4)
    )
    trees = [prefix_tree(SEQUENCES, trained=TRAINED, weights=WEIGHTS), prefix_tree([list(range(LENGTH))])]
    batches = [tree_batch(trees, layout, shard, padding=6) for shard in range(4)]
    full = whole(*trees, padding=6)
    assert torch.equal(layout.join([batch.tokens for batch in batches]), full.tokens)
    assert full.tokens[0, 10:].eq(6).all() and full.documents[0][-2:] == (10, LENGTH) and full.parents[0][-1] == -1
    sums = expected([*SEQUENCES, list(range(LENGTH))], [*TRAINED, [1] * LENGTH], [*WEIGHTS, 1])
    assert actual_weights(batches, layout) == pytest.approx(sums)
    assert sum(batch.labelled for batch in batches) == pytest.approx(sum(sums.values()))
    parts = [full.of_row(i) for i in range(2)]
    assert sum(part.labelled for part in parts) == pytest.approx(full.labelled)
    assert [part.parents for part in parts] == [full.parents[:1], full.parents[1:]]
