"""Random states: restored generators repeat their numbers."""

import random

import numpy as np
import torch

from armillary.train.random_state import random_state, seed_all, set_random_state

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
