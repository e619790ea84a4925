"""Sizes: what is refused, and what follows from them."""

from dataclasses import replace

import pytest
import torch

from armillary.models import Llama, LlamaConfig

DEBUG = LlamaConfig.debug()


def held(config: LlamaConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama(config).parameters())


@pytest.mark.parametrize(
    "config",
    [
        DEBUG,
        replace(DEBUG, tied_embeddings=True),
        replace(DEBUG, head_dim=32, kv_heads=1, layers=1),
        LlamaConfig.llama3_8b(),
    ],
)
def test_parameters_are_those_of_the_module(config):
    assert config.parameters() == held(config)


def test_published_and_documented_counts():
    assert LlamaConfig.llama3_8b().parameters() == 8_030_261_248
    assert DEBUG.parameters() == 804_224


def test_flops_count_every_multiplication_once():
    # By hand, 2 per multiply-add, forward: projections, MLP, norms, head; then scores and values over all keys.
    weights = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352 + 2 * 128) + 128 + 257 * 128
    attention = 4 * 8 * 2 * (2 * 16 * 1000)
    assert DEBUG.flops_per_token(1000, causal=False) == 3 * (2 * weights + attention)
    assert DEBUG.flops_per_token(1000) == 3 * (2 * weights + attention // 2)
    assert replace(DEBUG, tied_embeddings=True).flops_per_token(1000) == DEBUG.flops_per_token(1000)


def test_head_dim_follows_from_the_width_unless_given():
    assert DEBUG.head_dim == 16
    assert replace(DEBUG, head_dim=64).head_dim == 64


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kv_heads": 3}, "heads=8 is not a multiple of kv_heads=3"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"layers": 0}, "layers=0: it must be a whole number of at least 1"),
        ({"dim": 128.0}, "dim=128.0: it must be a whole number"),
        ({"heads": 0}, "heads=0"),
        ({"head_dim": -2}, "head_dim=-2"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0 must be at least 0"),
        ({"rope_theta": 0.0}, "rope_theta=0.0 above 0"),
    ],
)
def test_impossible_sizes_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        replace(DEBUG, **change)
