"""Packings, each against a slow and simple implementation."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from data_stores import numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data import best_fit, greedy, one_per_row
from armillary.data.loader.packed_sequences import Epochs

PACKINGS = [greedy, best_fit, one_per_row]
corpora = st.lists(st.integers(1, 60), min_size=1, max_size=40)
rooms = st.integers(1, 50)
thorough = settings(deadline=None, max_examples=25)


def packed(packing, lengths, room, key="key"):
    """Returns the rows as lists of pieces."""
    rows = packing(np.array(lengths), room, key)
    return [rows.row(number) for number in range(len(rows))]


def token_counts(rows, lengths):
    """Counts each token of each document in the rows."""
    actual = [[0] * length for length in lengths]
    for piece in (piece for row in rows for piece in row):
        for i in range(piece.start, piece.start + piece.length):
            actual[piece.document][i] += 1
    return actual


def decreasing_best_fit(sizes, room):
    """Returns the free tokens of each row after placing each size, largest first, where the fewest tokens remain."""
    free = []
    for size in sorted(sizes, reverse=True):
        fitting = [i for i, space in enumerate(free) if space >= size]
        if fitting:
            free[min(fitting, key=lambda i: free[i])] -= size
        else:
            free.append(room - size)
    return free


# -- all of them ------------------------------------------------------------------------------------------------------


@thorough
@given(st.sampled_from(PACKINGS), corpora, rooms, st.integers().map(str))
def test_rows_are_made_of_valid_slices_and_fit(packing, lengths, room, key):
    for row in packed(packing, lengths, room, key):
        assert 0 < sum(piece.length for piece in row) <= room
        for piece in row:
            assert piece.length > 0 and 0 <= piece.start <= lengths[piece.document] - piece.length


@thorough
@given(st.sampled_from(PACKINGS), corpora, rooms)
def test_a_cut_slice_ends_a_full_row(packing, lengths, room):
    for row in packed(packing, lengths, room):
        goes_on = [piece.start + piece.length < lengths[piece.document] for piece in row]
        assert not any(goes_on[:-1])
        assert not goes_on[-1] or sum(piece.length for piece in row) == room


@thorough
@given(st.sampled_from(PACKINGS), corpora, rooms)
def test_every_key_gives_equally_many_rows(packing, lengths, room):
    assert len({len(packed(packing, lengths, room, f"epoch {i}")) for i in range(5)}) == 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_key_decides_which_documents_share_a_row(packing):
    lengths = [7] * 100
    one, same, other = (packed(packing, lengths, 20, key) for key in ("a", "a", "b"))
    assert one == same != other


@pytest.mark.parametrize("packing", PACKINGS)
def test_documents_are_not_in_the_order_of_the_store(packing):
    order = [piece.document for row in packed(packing, [3] * 200, 10) for piece in row]
    assert sum(b == a + 1 for a, b in pairwise(dict.fromkeys(order))) < 20


# -- one by one -------------------------------------------------------------------------------------------------------


@thorough
@given(corpora, rooms)
def test_greedy_is_one_stream_of_documents_and_only_its_last_row_is_short(lengths, room):
    rows = packed(greedy, lengths, room)
    stream = [piece for row in rows for piece in row]
    tokens = [(piece.document, i) for piece in stream for i in range(piece.start, piece.start + piece.length)]
    order = list(dict.fromkeys(document for document, _ in tokens))
    assert tokens == [(document, i) for document in order for i in range(lengths[document])]
    assert sorted(order) == list(range(len(lengths)))
    assert {sum(piece.length for piece in row) for row in rows[:-1]} <= {room}
    assert len(rows) == -(-sum(lengths) // room)


@thorough
@given(corpora, rooms)
def test_best_fit_packs_every_token_once_and_splits_no_document_that_fits(lengths, room):
    rows = packed(best_fit, lengths, room)
    pieces = Counter(piece.document for row in rows for piece in row)
    assert token_counts(rows, lengths) == [[1] * length for length in lengths]
    assert [pieces[i] for i in range(len(lengths))] == [-(-length // room) for length in lengths]


def check_best_fit(lengths, room):
    """Compares the free tokens of rows with those of a placement piece by piece."""
    sizes = [min(room, length - start) for length in lengths for start in range(0, length, room)]
    free = [room - sum(piece.length for piece in row) for row in packed(best_fit, lengths, room)]
    assert sorted(free) == sorted(decreasing_best_fit(sizes, room))


@thorough
@given(corpora, rooms)
def test_best_fit_fills_rows_like_piece_by_piece_placement(lengths, room):
    check_best_fit(lengths, room)


@settings(deadline=None, max_examples=4)
@given(st.integers(0, 10**6))
def test_best_fit_of_many_documents_of_few_sizes(seed):
    check_best_fit(np.random.default_rng(seed).choice([1, 2, 3, 5, 30, 64, 65, 200], 300).tolist(), 64)


@thorough
@given(corpora, rooms)
def test_one_per_row_packs_the_start_of_each_document_once(lengths, room):
    rows = packed(one_per_row, lengths, room)
    assert sorted((row[0].document, row[0].start, row[0].length, len(row)) for row in rows) == [
        (i, 0, min(length, room), 1) for i, length in enumerate(lengths)
    ]


# -- waste ------------------------------------------------------------------------------------------------------------


@thorough
@given(st.sampled_from(PACKINGS), st.lists(st.integers(0, 60), min_size=1, max_size=30).filter(any), rooms)
def test_waste_equals_counted_tokens(packing, lengths, room):
    epochs = Epochs(numbered(lengths), room, packing, "key")
    rows, waste = [epochs.row(number) for number in range(epochs.rows)], epochs.waste()
    counts = token_counts([row.pieces for row in rows], lengths)
    full = {piece.document for row in rows for piece in row.pieces if piece.length == lengths[piece.document]}
    assert waste.rows == len(rows)
    assert waste.padding == pytest.approx(
        sum(row.ends[-1] - row.ends[len(row.pieces)] for row in rows) / (room * len(rows))
    )
    assert waste.dropped == pytest.approx(sum(n == 0 for tokens in counts for n in tokens) / sum(lengths))
    assert waste.cut == pytest.approx(1 - len(full) / sum(length > 0 for length in lengths))
