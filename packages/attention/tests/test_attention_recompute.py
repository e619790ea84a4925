"""Chunks of tokens, and recomputation with equal random numbers and autocast state."""

from itertools import pairwise

import pytest
import torch

from armillary.attention.internal import RNGReplay, capture_autocast
from armillary.core.internal import chunks, simulating


def test_chunks_cover_all_tokens_once_and_a_simulation_skips_equal_ones():
    for tokens, size in ((0, None), (35, 10), (35, 35), (35, 100), (10_000_000, None), (10_000_000, 99_991)):
        cut = chunks(tokens, size)
        assert cut[0].start == 0 and cut[-1].stop == tokens, (tokens, size)
        assert all(a.stop == b.start for a, b in pairwise(cut)), (tokens, size)
        assert size is not None or len(cut) <= 64
    with simulating():
        assert chunks(35, 10) == [slice(0, 10), slice(10, 20), slice(30, 35)]
        assert chunks(30, 10) == [slice(0, 10), slice(10, 20), slice(20, 30)]
    with pytest.raises(ValueError, match=r"chunks.*0"):
        chunks(10, 0)


def test_recomputation_draws_the_same_numbers_and_restores_the_generator():
    draws, device = RNGReplay(), torch.device("cpu")
    with draws.at("a", device):
        first = torch.rand(4)
    with draws.at("nothing", device):
        torch.ones(3)
    with draws.at("b", device):
        second = torch.rand(4)
    before = torch.get_rng_state()
    for part, expected in (("b", second), ("a", first), ("a", first)):
        with draws.restart().at(part, device):
            assert torch.equal(torch.rand(4), expected)
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(first, second)


def test_autocast_state_is_restored():
    with torch.autocast("cpu", torch.bfloat16):
        then = capture_autocast("cpu")
    assert not torch.is_autocast_enabled("cpu")
    with then():
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
