"""Rows: their tokens, labels and documents, which are equal on every mesh."""

from itertools import pairwise

import pytest
import torch
from data_stores import (
    PADDING,
    every_shard,
    expected_row,
    joined,
    layouts,
    numbered,
    read_rows,
    shapes,
    single_rank_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.core import SequenceLayout
from armillary.data import IGNORE, PackedSequences, best_fit, greedy, one_per_row

N = 37  # prime: no number of shards divides it
LENGTHS = [0, 5, 50, 37, 1, 0, 80, 111, 12, 30, 2]
STORE = numbered(LENGTHS)
PACKINGS = [greedy, best_fit, one_per_row]
quick = settings(deadline=None, max_examples=25)


# -- contents of a row ------------------------------------------------------------------------------------------------


@quick
@given(st.data(), shapes, st.integers(1, 40), st.sampled_from(PACKINGS), st.integers(0, 5))
def test_joined_shards_equal_the_row_with_labels_documents_and_positions(data, lengths, length, packing, seed):
    layout = data.draw(layouts(length))
    choices = {"packing": packing, "seed": seed, "reset_positions": data.draw(st.booleans())}
    ranks = every_shard(numbered(lengths), layout, rows_per_batch=3, **choices)
    batches = [rank.batch(2) for rank in ranks]
    expected = read_rows(single_rank_rows(numbered(lengths), length, packing=packing, seed=seed), 6, 9)
    tokens, labels, positions = joined(batches)
    assert tokens.tolist() == expected
    for row, tokens in enumerate(expected):
        next_ones, documents, distances = expected_row(tokens, lengths)
        assert labels[row].tolist() == next_ones
        assert [batch.documents[row] for batch in batches] == [documents] * layout.shards
        assert positions[row].tolist() == (distances if choices["reset_positions"] else list(range(length)))


@quick
@given(shapes, st.integers(1, 40), st.sampled_from([greedy, best_fit]), st.integers(0, 3))
def test_every_token_of_every_document_is_read_once_per_epoch(lengths, length, packing, epoch):
    rows = single_rank_rows(numbered(lengths), length, packing=packing)
    actual = read_rows(rows, epoch * rows.rows_per_epoch, (epoch + 1) * rows.rows_per_epoch)
    assert {len(row) for row in actual} == {length}
    assert sorted(token for row in actual for token in row if token != PADDING) == list(range(sum(lengths)))


@quick
@given(shapes, st.integers(1, 40), st.sampled_from(PACKINGS))
def test_documents_are_contiguous_in_a_row_and_padding_is_at_its_end(lengths, length, packing):
    rows = single_rank_rows(numbered(lengths), length, packing=packing)
    for tokens in read_rows(rows, 0, rows.rows_per_epoch):
        unpadded = [token for token in tokens if token != PADDING]
        _, bounds, _ = expected_row(unpadded, lengths)
        assert tokens == unpadded + [PADDING] * (length - len(unpadded))
        assert unpadded == [unpadded[a] + i for a, b in pairwise(bounds) for i in range(b - a)] != []


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_labels_of_every_kind_of_shard_are_the_next_tokens(kind):
    ranks = every_shard(STORE, getattr(SequenceLayout, kind)(N, 4), rows_per_batch=4)
    tokens, labels, _ = joined([rank.batch(0) for rank in ranks])
    assert labels.tolist() == [expected_row(row, LENGTHS)[0] for row in tokens.tolist()]


def test_padding_is_zero_without_a_known_end_of_document():
    store = numbered([4])
    store.vocabulary = type(store.vocabulary)()
    assert single_rank_rows(store, 6).batch(0).tokens.tolist() == [[0, 1, 2, 3, 0, 0]]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_the_largest_token_of_a_dtype_is_preserved(dtype):
    store, largest = numbered([3], dtype), torch.iinfo(getattr(torch, dtype)).max
    store.arrays[0][:] = largest
    batch = single_rank_rows(store, 3).batch(0)
    assert {x.dtype for x in (batch.tokens, batch.labels, batch.positions)} == {torch.int64}
    assert batch.tokens.tolist() == [[largest] * 3]
    assert batch.labels.tolist() == [[largest, largest, IGNORE]]


# -- the order of rows ------------------------------------------------------------------------------------------------


def test_each_epoch_is_packed_differently():
    rows = single_rank_rows(STORE, N)
    epochs = [read_rows(rows, n * rows.rows_per_epoch, (n + 1) * rows.rows_per_epoch) for n in (0, 1, 40)]
    assert len({str(sorted(epoch)) for epoch in epochs}) == 3


def test_each_epoch_is_packed_once_although_batches_span_two():
    packed = []

    def counted(lengths, length, key):
        packed.append(key)
        return greedy(lengths, length, key)

    rows = single_rank_rows(STORE, N, packing=counted, ahead=3)
    for _ in range(3 * rows.rows_per_epoch):
        next(rows)
    assert len(packed) == len(set(packed)) <= 4


def test_seed_decides_the_order_without_global_random_state():
    state = torch.get_rng_state()
    orders = [read_rows(single_rank_rows(STORE, N, seed=seed), 0, 9) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_changing_a_batch_in_place_changes_no_later_batch():
    rows = single_rank_rows(STORE, N)
    batch = rows.batch(0)
    before = [tensor.clone() for tensor in (batch.tokens, batch.labels, batch.positions)]
    for tensor in (batch.tokens, batch.labels, batch.positions):
        tensor.add_(1)
    repeated = rows.batch(0)
    assert all(map(torch.equal, before, (repeated.tokens, repeated.labels, repeated.positions)))


def test_rows_and_tokens_are_counted_over_all_ranks():
    layout = SequenceLayout.zigzag(N, 3)
    rows = PackedSequences(STORE, layout=layout, shard=2, rows_per_batch=3, replica=1, replicas=4)
    assert rows.rows_per_epoch == -(-sum(LENGTHS) // N)
    assert rows.rows_per_step == 12
    assert rows.tokens_per_batch == 12 * N


def test_batches_describe_their_rows_and_token_positions():
    rows = PackedSequences(STORE, layout=SequenceLayout.zigzag(N, 3), shard=2, rows_per_batch=3, replica=1, replicas=4)
    assert [rows.batch(step).rows for step in (0, 2)] == [range(3, 6), range(27, 30)]
    training, _ = STORE.split(0.3)
    full = single_rank_rows(training, N)
    for number in range(full.rows_per_epoch):
        name, places = full.describe(number).split(", tokens ")
        spans = [tuple(map(int, part.split(".."))) for part in places.split(", ")]
        assert name == STORE.name
        tokens = [token for first, last in spans for token in STORE.arrays[0][first : last + 1].tolist()]
        assert tokens == [token for token in full.batch(number).tokens[0].tolist() if token != PADDING]
    assert single_rank_rows(numbered([1] * 30), 20, packing=best_fit).describe(0).endswith(" and 12 more parts")


# -- layouts by documents ---------------------------------------------------------------------------------------------


def test_layout_can_depend_on_the_documents_of_each_batch():
    def balanced(documents):
        return SequenceLayout.balanced(N, 3, documents=documents)

    ranks = every_shard(STORE, SequenceLayout.zigzag(N, 3), rows_per_batch=2, layout_for=balanced)
    for step in range(4):
        batches = [rank.batch(step) for rank in ranks]
        assert {batch.layout for batch in batches} == {balanced(batches[0].documents)}
        assert joined(batches)[0].tolist() == read_rows(single_rank_rows(STORE, N), 2 * step, 2 * step + 2)
