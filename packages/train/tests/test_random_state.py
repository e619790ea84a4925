"""Random states: restored generators repeat their numbers, and invalid states are refused."""

import random

import numpy as np
import pytest
import torch

from armillary.train.runtime.random_state import WORDS, random_state, seed_all, set_random_state

CPU = torch.device("cpu")


def draw() -> list[float]:
    """One number per generator, and normal ones, which Python and numpy draw in pairs."""
    return [random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_equal_states_give_equal_numbers():
    seed_all(7, 3)
    draw()
    saved_state = random_state(CPU)
    expected = draw()
    seed_all(7, 4)
    assert draw() != expected
    set_random_state(saved_state, CPU)
    assert draw() == expected


@pytest.mark.parametrize("place", [-1, WORDS + 1])
def test_a_position_out_of_range_is_refused(place):
    state = random_state(CPU)
    state["numpy"][-2] = place
    with pytest.raises(ValueError, match=f"no state of random numbers .position {place} of {WORDS}."):
        set_random_state(state, CPU)


def test_an_invalid_state_is_refused():
    with pytest.raises(ValueError, match="no state of random numbers"):
        set_random_state({"torch": torch.zeros(3)}, CPU)
