"""Recall across shards: a query cannot be answered from its own shard, on any layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_synthetic import answer, layouts, row

from armillary.core import SequenceLayout
from armillary.data.loader.batch import IGNORE
from armillary.data.synthetic import AssociativeRecall, Copy, Needle
from armillary.data.synthetic.cross_shard import Matching

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
    """For each query of a row: what its own shard says, or None, and whether that shard holds any of the pair."""
    tokens, labels = row(task, number)
    owner = layout.join([torch.full((size,), shard) for shard, size in enumerate(layout.sizes)], 0).tolist()
    for at in (i for i, label in enumerate(labels) if label != IGNORE):
        seen = [token if owner[i] == owner[at] else -1 for i, token in enumerate(tokens)]
        pair = tokens.index(tokens[at])
        yield answer(seen, at), owner[at] in owner[pair : pair + 2]


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_query_can_be_answered_from_its_own_shard(name):
    layout = LAYOUTS[name]
    for pairs, queries, gap, tail in [(20, 20, 0, None), (40, 12, 0, None), (20, 5, 3, 100)]:
        task = AssociativeRecall(N, pairs, queries, keys=64, values=8, gap=gap, tail=tail, across=layout)
        found = [query for number in range(4) for query in solve_alone(task, layout, number)]
        assert len(found) == 4 * queries
        assert sum(said is not None for said, _ in found) == 0
        assert not any(held for _, held in found)


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_it_pairs_lie_on_the_shards_of_their_queries_too(name):
    task = AssociativeRecall(N, 20, 20, keys=64, values=8)
    found = [query for number in range(10) for query in solve_alone(task, LAYOUTS[name], number)]
    assert any(held for _, held in found)


@settings(deadline=None, max_examples=25)
@given(layout=layouts(24), queries=st.integers(1, 6), more=st.integers(0, 2), tail=st.sampled_from([None, 12]))
def test_a_layout_either_serves_every_row_or_is_refused_at_once(layout, queries, more, tail):
    try:
        task = AssociativeRecall(24, min(6, queries + more), queries, 12, 4, tail=tail, across=layout)
    except ValueError as error:
        assert "has no places" in str(error)
        return
    for number in range(12):
        assert list(solve_alone(task, layout, number)) == [(None, False)] * queries


def most(asking, holding):
    """How many queries can get a pair, by trying all ways."""
    if not asking:
        return 0
    others = [
        most(asking[1:], holding[:i] + holding[i + 1 :]) for i, pair in enumerate(holding) if asking[0] not in pair
    ]
    return max([most(asking[1:], holding), *(1 + other for other in others)])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3), max_size=5), st.lists(st.tuples(*[st.integers(0, 3)] * 2), min_size=1, max_size=5))
def test_as_many_queries_get_a_pair_as_can(asking, holding):
    pairs = Matching(torch.tensor(asking, dtype=torch.int64).numpy(), torch.tensor(holding).T.numpy()).pairs.tolist()
    got = [(shard, pair) for shard, pair in zip(asking, pairs, strict=True) if pair >= 0]
    assert len({pair for _, pair in got}) == len(got) == most(asking, holding)
    assert all(shard not in holding[pair] for shard, pair in got)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [SequenceLayout.contiguous(N, 1), SequenceLayout.striped(N, 2)])
def test_a_layout_whose_shards_touch_every_pair_is_refused(layout):
    with pytest.raises(
        ValueError, match=r"SequenceLayout\(length=240.*has no places for 2 pairs.*; give fewer queries"
    ):
        AssociativeRecall(N, 2, 2, 8, 8, across=layout)


REFUSED = {
    "queries must be at least 1; got 0": lambda: AssociativeRecall(N, 4, 0, 8, 8),
    "values must be at least 1; got 0": lambda: AssociativeRecall(N, 4, 4, 8, 0),
    "gap must be at least 0; got -1": lambda: AssociativeRecall(N, 4, 4, 8, 8, gap=-1),
    "5 queries, 4 pairs, 8 keys: .*; give at least as many pairs": lambda: AssociativeRecall(N, 4, 5, 8, 8),
    "4 queries, 9 pairs, 8 keys: ": lambda: AssociativeRecall(N, 9, 4, 8, 8),
    "tail=7 is too short for 4 queries of 2 tokens; give 8": lambda: AssociativeRecall(N, 4, 4, 8, 8, tail=7),
    "row of 19 tokens is too short for 4 .* give at least 20": lambda: AssociativeRecall(19, 4, 4, 8, 8, gap=4),
    "a layout of 240 tokens; the row has 24": lambda: AssociativeRecall(24, 4, 4, 8, 8, across=LAYOUTS["zigzag"]),
    "needle_tokens must be at least 1; got 0": lambda: Needle(N, needle_tokens=0),
    "depth must lie between 0 and 1, or be None.*; got 1.5": lambda: Needle(N, depth=1.5),
    "row of 9 tokens is too short for a needle of 4 .* give at least 10": lambda: Needle(9, needle_tokens=4),
    "length must be at least 3; got 2": lambda: Copy(2),
    "symbols must be at least 1; got 0": lambda: Copy(N, symbols=0),
    "offset must be at least 0; got -1": lambda: Copy(N, offset=-1),
    "rows count from 0; got -1": lambda: Copy(N).tokens(-1, torch.arange(3)),
    "position 240 is not one of the 240 positions 0..239": lambda: Needle(N).labels(0, torch.arange(9, N + 1)),
    "position -1 is not one of": lambda: AssociativeRecall(N, 4, 4, 8, 8).tokens(0, torch.tensor([-1])),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_is_refused_with_what_can(said):
    with pytest.raises(ValueError, match=said):
        REFUSED[said]()


@pytest.mark.parametrize("length", [20, 21])
def test_what_errors_call_long_enough_is(length):
    assert row(AssociativeRecall(length, 4, 4, 8, 8, gap=4))
    assert row(Needle(10, needle_tokens=4))
