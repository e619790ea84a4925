"""Random number generators: what they draw next is what was kept, and nothing is read behind their words."""

import random

import numpy as np
import pytest
import torch

from armillary.train.runtime.random_state import WORDS, random_state, seed_all, set_random_state

CPU = torch.device("cpu")


def drawn() -> list[float]:
    """One number of each, a normal one too, of which Python and numpy draw two at a time."""
    return [random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_equal_states_give_equal_numbers():
    seed_all(7, 3)
    drawn()
    saved_state = random_state(CPU)
    expected = drawn()
    seed_all(7, 4)
    assert drawn() != expected
    set_random_state(saved_state, CPU)
    assert drawn() == expected


@pytest.mark.parametrize("place", [-1, WORDS + 1])
def test_a_position_beyond_the_words_is_refused(place):
    state = random_state(CPU)
    state["numpy"][-2] = place
    with pytest.raises(ValueError, match=f"no state of random numbers .position {place} of {WORDS}."):
        set_random_state(state, CPU)


def test_numbers_that_are_no_state_are_refused():
    with pytest.raises(ValueError, match="no state of random numbers"):
        set_random_state({"torch": torch.zeros(3)}, CPU)
