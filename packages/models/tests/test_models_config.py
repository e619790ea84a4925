"""Model configs: refusals, parameter counts and FLOPs."""

import math
from dataclasses import replace

import pytest
import torch

from armillary.attention import AttentionMask
from armillary.models import GPTConfig, Llama, LlamaConfig
from armillary.models.parts import meta_model, parameter_shapes

DEBUG = LlamaConfig.debug()


def count_parameters(config: LlamaConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama(config).parameters())


@pytest.mark.parametrize(
    "config",
    [
        DEBUG,
        replace(DEBUG, tied_embeddings=True),
        replace(DEBUG, head_dim=32, kv_heads=1, layers=1),
        replace(DEBUG, qkv_bias=True),
        replace(DEBUG, qk_norm=True, out_bias=True, mlp_bias=True),
    ],
)
def test_parameter_counts_match_the_module(config):
    assert config.parameters() == count_parameters(config)


# -- floating-point operations ------------------------------------------------------------------------------------

# Counted by hand, forward, 2 per multiply-add: projections, MLP, norms, head; then scores and values over all keys.
WEIGHTS = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352 + 2 * 128) + 128 + 257 * 128
A_KEY = 8 * 2 * (2 * 16)


def test_flops_count_every_multiplication_once():
    assert DEBUG.flops_per_token(1000, AttentionMask(causal=False)) == 3 * (2 * WEIGHTS + 4 * 1000 * A_KEY)
    assert DEBUG.flops_per_token(1000) == 3 * (2 * WEIGHTS + 4 * 500.5 * A_KEY)
    assert replace(DEBUG, tied_embeddings=True).flops_per_token(1000) == DEBUG.flops_per_token(1000)
    gpt = GPTConfig(dim=128, layers=4, heads=8)
    learned = gpt.parameters() - 1024 * 128
    assert gpt.flops_per_token(1000) == pytest.approx(3 * (2 * learned + 4 * 500.5 * A_KEY), rel=1e-15)


def test_flops_count_only_visible_pairs():
    windowed = replace(DEBUG, window=3, window_from=3)
    # Documents of 4 and 6: 10 + 21 pairs; with three keys at most, 9 + 15.
    packed = AttentionMask(documents=[0, 4, 10])
    keys = (3 * 31 + 24) / 10
    assert windowed.flops_per_token(10, packed) == pytest.approx(3 * (2 * WEIGHTS + keys * A_KEY), rel=1e-15)
    rows = AttentionMask(documents=[[0, 4, 10], [0, 10]])
    keys = (3 * (31 + 55) / 2 + (24 + 27) / 2) / 10
    assert windowed.flops_per_token(10, rows) == pytest.approx(3 * (2 * WEIGHTS + keys * A_KEY), rel=1e-15)


def test_head_dim_follows_from_the_width_by_default():
    assert DEBUG.head_dim == 16
    assert replace(DEBUG, head_dim=64).head_dim == 64


@pytest.mark.parametrize(
    "config",
    [
        DEBUG,
        replace(DEBUG, tied_embeddings=True, layers=12, window=5, window_from=11),
        replace(DEBUG, qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True, layers=1),
        GPTConfig(dim=8, layers=11, heads=2, vocab_size=7, max_positions=9),
    ],
)
def test_shapes_match_the_module(config):
    expected = {name: tuple(tensor.shape) for name, tensor in meta_model(config).state_dict().items()}
    assert parameter_shapes(meta_model, config) == expected
    assert sum(map(math.prod, expected.values())) == config.parameters()
