"""Recall across shards: no shard has the answers of its queries, on any layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_synthetic import answer, layouts, row

from armillary.core import SequenceLayout
from armillary.data.loader.batch import IGNORE
from armillary.data.synthetic import AssociativeRecall, Copy, Needle
from armillary.data.synthetic.cross_shard import match_pairs

N = 240

LAYOUTS = {
    "contiguous": SequenceLayout.contiguous(N, 4),
    "zigzag": SequenceLayout.zigzag(N, 4),
    "zigzag, 2": SequenceLayout.zigzag(N, 2),
    "striped": SequenceLayout.striped(N, 4),
    "striped, 3": SequenceLayout.striped(N, 3),
    "striped, wide": SequenceLayout.striped(N, 2, stripe=6),
    "refined": SequenceLayout.striped(N, 3).refine(2),
    "balanced": SequenceLayout.balanced(N, 4, documents=(0, 100, 120, N)),
}


def solve_alone(task, layout, number):
    """For each query of a row: the answer from its own shard or None, and whether that shard has part of the pair."""
    tokens, labels = row(task, number)
    owner = layout.join([torch.full((size,), shard) for shard, size in enumerate(layout.sizes)], 0).tolist()
    for query in (i for i, label in enumerate(labels) if label != IGNORE):
        visible = [token if owner[i] == owner[query] else -1 for i, token in enumerate(tokens)]
        pair = tokens.index(tokens[query])
        yield answer(visible, query), owner[query] in owner[pair : pair + 2]


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_query_can_be_answered_from_its_own_shard(name):
    layout = LAYOUTS[name]
    for pairs in (20, 30, 5):
        task = AssociativeRecall(N, pairs, keys=64, values=8, across=layout)
        assert [query for number in range(4) for query in solve_alone(task, layout, number)] == [
            (None, False)
        ] * 4 * pairs


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_across_some_pairs_are_on_the_shards_of_their_queries(name):
    task = AssociativeRecall(N, 20, keys=64, values=8)
    assert any(local for number in range(10) for _, local in solve_alone(task, LAYOUTS[name], number))


@settings(deadline=None, max_examples=25)
@given(layout=layouts(24), pairs=st.integers(1, 6))
def test_layouts_fit_every_row_or_are_refused_at_once(layout, pairs):
    try:
        task = AssociativeRecall(24, pairs, 12, 4, across=layout)
    except ValueError as error:
        assert f"no places for {pairs} pairs" in str(error)
        return
    for number in range(12):
        assert list(solve_alone(task, layout, number)) == [(None, False)] * pairs


def most_matches(queries, pairs):
    """The largest number of queries that can have a pair, by brute force."""
    if not queries:
        return 0
    matched = [
        most_matches(queries[1:], pairs[:i] + pairs[i + 1 :]) for i, pair in enumerate(pairs) if queries[0] not in pair
    ]
    return max([most_matches(queries[1:], pairs), *(1 + count for count in matched)])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3), max_size=5), st.lists(st.tuples(*[st.integers(0, 3)] * 2), min_size=1, max_size=5))
def test_as_many_queries_as_possible_get_a_pair(query_shards, pair_shards):
    pairs = match_pairs(np.array(query_shards, np.int64), np.array(pair_shards, np.int64).T).tolist()
    matches = [(shard, pair) for shard, pair in zip(query_shards, pairs, strict=True) if pair >= 0]
    assert len({pair for _, pair in matches}) == len(matches) == most_matches(query_shards, pair_shards)
    assert all(shard not in pair_shards[pair] for shard, pair in matches)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [SequenceLayout.contiguous(N, 1), SequenceLayout.striped(N, 2)])
def test_layouts_whose_shards_touch_every_pair_are_refused(layout):
    with pytest.raises(ValueError, match=r"length=240.* 2 pairs"):
        AssociativeRecall(N, 2, 8, 8, across=layout)


REFUSALS = {
    "pairs .* 1; got 0": lambda: AssociativeRecall(N, 0, 8, 8),
    "values .* 1; got 0": lambda: AssociativeRecall(N, 4, 8, 0),
    r"pairs .*keys \(8\).* got 9": lambda: AssociativeRecall(N, 9, 8, 8),
    "15 tokens .* 4 pairs .* 16": lambda: AssociativeRecall(15, 4, 8, 8),
    "across .* 240 .* 24": lambda: AssociativeRecall(24, 4, 8, 8, across=LAYOUTS["zigzag"]),
    "needle_tokens .* 1; got 0": lambda: Needle(N, needle_tokens=0),
    "depth .* 0 and 1.* got 1.5": lambda: Needle(N, depth=1.5),
    "9 tokens .* 4 .* 10": lambda: Needle(9, needle_tokens=4),
    "length .* 3; got 2": lambda: Copy(2),
    "symbols .* 1; got 0": lambda: Copy(N, symbols=0),
    "row .* 0; got -1": lambda: Copy(N).tokens(-1, torch.arange(3)),
    "position 240 .*0..239": lambda: Needle(N).labels(0, torch.arange(9, N + 1)),
    "position -1 ": lambda: AssociativeRecall(N, 4, 8, 8).tokens(0, torch.tensor([-1])),
}


@pytest.mark.parametrize("pattern", REFUSALS)
def test_a_refusal_names_the_argument_and_its_value(pattern):
    with pytest.raises(ValueError, match=pattern):
        REFUSALS[pattern]()


@pytest.mark.parametrize("length", [16, 17])
def test_the_shortest_rows_that_errors_name_are_accepted(length):
    assert row(AssociativeRecall(length, 4, 8, 8))
    assert row(Needle(10, needle_tokens=4))
