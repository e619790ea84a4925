"""Orders: equal in every process and release; mixtures give each source its proportion at every place."""

import os
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data.loader.packed_sequences import items_until, source_at
from armillary.data.packing import permutation
from armillary.data.store import random_bits, stable_hash

weight_lists = st.lists(st.fractions(Fraction(1, 50), 50), min_size=1, max_size=5)


# -- hashes -----------------------------------------------------------------------------------------------------------


def test_hash_is_the_same_in_every_process_and_release():
    assert stable_hash("armillary") == stable_hash(b"armillary") == 13729582951640400556
    assert stable_hash(b"") == 16406829232824261652
    assert stable_hash(os.fsdecode(b"caf\xe9")) == stable_hash(b"caf\xe9") != stable_hash("caf")


def splitmix(key, place):
    """Output number `place` of the generator that starts at `key`, in Python's integers."""
    z = (stable_hash(key) + place * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@settings(deadline=None, max_examples=25)
@given(st.integers().map(str), st.lists(st.integers(0, 2**63 - 1)))
def test_random_bits_match_splitmix(key, places):
    assert random_bits(key, np.array(places, np.int64)).tolist() == [splitmix(key, place) for place in places]


# -- permutations -----------------------------------------------------------------------------------------------------


def test_permutations_never_change():
    assert permutation(12, "").tolist() == [7, 0, 5, 10, 8, 3, 9, 4, 1, 6, 11, 2]
    assert permutation(12, "store 0, seed 0").tolist() == [8, 6, 10, 7, 11, 1, 2, 5, 3, 4, 0, 9]


def test_permutations_depend_on_their_key_and_move_items():
    orders = [permutation(1000, key) for key in ("a", "b", "seed 1", "seed 2")]
    assert all((orders[i] == orders[j]).sum() < 10 for i in range(4) for j in range(i))
    assert all((order == np.arange(1000)).sum() < 10 for order in orders)


# -- mixtures ---------------------------------------------------------------------------------------------------------


def by_time(weights, places):
    """The first (source, number of its turn), sorted by time."""
    turns = [((k + Fraction(1, 2)) / w, s, k) for s, w in enumerate(weights) for k in range(places)]
    return [(s, k) for _, s, k in sorted(turns)[:places]]


@settings(deadline=None, max_examples=20)
@given(weight_lists, st.integers(1, 60))
def test_places_are_turns_sorted_by_time(weights, places):
    assert [source_at(place, weights) for place in range(places)] == by_time(weights, places)


@settings(deadline=None, max_examples=20)
@given(weight_lists, st.integers(0, 10**12))
def test_distant_places_are_consecutive_turns(weights, far):
    actual = [source_at(far + i, weights) for i in range(20)]
    times = [((turn + Fraction(1, 2)) / weights[source], source) for source, turn in actual]
    assert times == sorted(times)
    for source in range(len(weights)):
        turns = [turn for s, turn in actual if s == source]
        assert turns == list(range(turns[0], turns[0] + len(turns))) if turns else True


@pytest.mark.parametrize("weights", [[1], [3, 3], [1, 2, 4], [0.1, 0.7, 0.2]])
def test_items_until_a_place_count_earlier_places(weights):
    weights = [Fraction(weight) for weight in weights]
    turns = [(source, (turn + Fraction(1, 2)) / weights[source]) for source, turn in by_time(weights, 60)]
    for time in {time for _, time in turns[:30]}:
        assert items_until(time, weights) == [
            sum(s == source and at <= time for s, at in turns) for source in range(len(weights))
        ]
    assert items_until(Fraction(0), weights) == items_until(Fraction(-3), weights) == [0] * len(weights)
