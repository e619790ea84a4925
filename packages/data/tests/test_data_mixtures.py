"""Several stores, mixed row by row by their weights."""

from collections import Counter
from dataclasses import replace

import pytest
from data_stores import PADDING, every_shard, joined, numbered, read_rows, single_rank_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.core import SequenceLayout
from armillary.data import Vocabulary, best_fit, greedy

N = 8
SIZES = [[30, 5, 20], [9, 9], [100, 3]]


def shifted(lengths, by):
    """Numbered documents whose tokens are in no other store."""
    store = numbered(lengths)
    return replace(store, arrays=[store.arrays[0] + by], content=f"{store.content} from {by}")


STORES = [shifted(lengths, 1000 * i) for i, lengths in enumerate(SIZES)]


def sources(rows, places):
    """Returns the index of each row's store."""
    actual = [{token // 1000 for token in row if token != PADDING} for row in read_rows(rows, 0, places)]
    assert all(len(stores) == 1 for stores in actual)
    return [stores.pop() for stores in actual]


@pytest.mark.parametrize("packing", [greedy, best_fit])
def test_by_default_every_store_is_read_once_an_epoch(packing):
    rows = single_rank_rows(STORES, N, packing=packing)
    size = rows.rows_per_epoch
    for epoch in range(3):
        actual = read_rows(rows, epoch * size, (epoch + 1) * size)
        tokens = sorted(token for row in actual for token in row if token != PADDING)
        assert tokens == [1000 * i + t for i, lengths in enumerate(SIZES) for t in range(sum(lengths))]


@pytest.mark.parametrize("weights", [[5, 3, 1], [0.7, 0.1, 0.2]])
def test_rows_are_mixed_by_weight(weights):
    rows, places = single_rank_rows(STORES, N, weights=weights), 222
    counts = Counter(sources(rows, places))
    assert all(abs(counts[i] - places * weight / sum(weights)) <= 1 for i, weight in enumerate(weights))


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 20), min_size=3, max_size=3))
def test_epoch_of_any_weights_is_the_shortest_that_reads_every_document(weights):
    rows = single_rank_rows(STORES, N, weights=weights)
    counts = Counter(sources(rows, rows.rows_per_epoch))
    rows_needed = [-(-sum(lengths) // N) for lengths in SIZES]
    assert all(counts[i] >= rows_of_store for i, rows_of_store in enumerate(rows_needed))
    before = Counter(sources(rows, rows.rows_per_epoch - len(STORES)))
    assert any(before[i] < rows_of_store for i, rows_of_store in enumerate(rows_needed))


def test_rows_of_a_store_do_not_depend_on_the_weights():
    first = [
        [row for row in read_rows(single_rank_rows(STORES, N, weights=w), 0, 120) if row[0] < 1000]
        for w in ([3, 1, 1], [9, 2, 5])
    ]
    shorter = min(map(len, first))
    assert shorter > 40
    assert first[0][:shorter] == first[1][:shorter]


def test_copies_of_a_store_are_shuffled_differently():
    rows = single_rank_rows([STORES[0], STORES[0]], N)
    actual = read_rows(rows, 0, rows.rows_per_epoch)
    assert actual[0::2] != actual[1::2]
    assert len(actual) == 14


def test_mixtures_are_the_same_on_every_mesh():
    layout = SequenceLayout.zigzag(N, 3)
    ranks = every_shard(STORES, layout, weights=[1, 2, 3], rows_per_batch=4, replica=1, replicas=2)
    actual = [joined([rank.batch(step) for rank in ranks])[0].tolist() for step in range(5)]
    reference = single_rank_rows(STORES, N, weights=[1, 2, 3])
    assert actual == [read_rows(reference, 8 * step + 4, 8 * step + 8) for step in range(5)]


def test_tokenizers_with_equally_many_tokens_are_different():
    first, second = numbered([3], name="first"), numbered([3])
    first.vocabulary = replace(second.vocabulary, tokenizer="bytes")
    with pytest.raises(ValueError, match="bytes"):
        single_rank_rows([first, second], N)


def test_a_store_without_tokenizer_mixes_with_any():
    unknown = numbered([N])
    unknown.vocabulary = Vocabulary()
    assert single_rank_rows([numbered([N]), unknown], N).rows_per_epoch == 2
