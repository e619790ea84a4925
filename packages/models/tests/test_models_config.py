"""Model configs: presets, parameter counts and FLOPs."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hybrid_models import HYBRID
from latent_models import DIRECT, LATENT

from armillary.attention import AttentionMask
from armillary.models import GPTConfig, LlamaConfig
from armillary.models.internal import hub, meta_model, parameter_shapes

DEBUG = LlamaConfig.debug()


PRESETS = {
    LlamaConfig.debug: 804_224,
    LlamaConfig.llama2_7b: 6_738_415_616,
    LlamaConfig.llama3_8b: 8_030_261_248,
    LlamaConfig.llama31_8b: 8_030_261_248,
    LlamaConfig.llama3_70b: 70_553_706_496,
    LlamaConfig.mistral_7b: 7_241_732_096,
    LlamaConfig.qwen3_32b: 32_762_123_264,
    LlamaConfig.youtu_2b: 1_961_560_064,
    GPTConfig.gpt2: 124_439_808,
    GPTConfig.gpt2_medium: 354_823_168,
    GPTConfig.gpt2_large: 774_030_080,
    GPTConfig.gpt2_xl: 1_557_611_200,
    GPTConfig.wallfacer_3b: 2_626_613_248,
    GPTConfig.wallfacer_7b: 6_654_210_048,
}
"""Published numbers of parameters."""


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.__name__)
def test_presets_have_the_published_sizes_and_survive_a_folder(preset, tmp_path):
    config = preset()
    assert config.parameters() == PRESETS[preset]
    (tmp_path / "config.json").write_text(json.dumps(hub.describe(config, torch.bfloat16)))
    assert hub.read_config(tmp_path, type(config)) == config


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


def test_flops_of_latents_count_the_expansion_once_per_token_and_dims_of_queries_and_values():
    # Forward, 2 per multiply-add: down to latents, up to 8 heads, output, MLP, norms, head; then scores and values.
    projections = 32 * (14 + 10 + 4) + 14 * 8 * 12 + 10 * 8 * (8 + 6) + 8 * 6 * 32
    weights = 2 * (projections + 3 * 32 * 48 + 2 * 32 + 14 + 10) + 32 + 37 * 32
    assert LATENT.flops_per_token(100, AttentionMask(causal=False)) == 3 * (2 * weights + 2 * 100 * 8 * 2 * (12 + 6))


def test_flops_count_only_visible_pairs():
    windowed = replace(DEBUG, window=3, window_from=3)
    # Documents of 4 and 6: 10 + 21 pairs; with three keys at most, 9 + 15.
    packed = AttentionMask(documents=[0, 4, 10])
    keys = (3 * 31 + 24) / 10
    assert windowed.flops_per_token(10, packed) == pytest.approx(3 * (2 * WEIGHTS + keys * A_KEY), rel=1e-15)
    rows = AttentionMask(documents=[[0, 4, 10], [0, 10]])
    keys = (3 * (31 + 55) / 2 + (24 + 27) / 2) / 10
    assert windowed.flops_per_token(10, rows) == pytest.approx(3 * (2 * WEIGHTS + keys * A_KEY), rel=1e-15)


def test_flops_count_states_and_attention_layers_only():
    attention = replace(HYBRID, mixers=("attention",), states=None)
    without_weights = [
        config.flops_per_token(64) - 6 * (config.parameters() - 37 * 32) for config in (HYBRID, attention)
    ]
    assert without_weights[0] < without_weights[1]
    rates = [HYBRID.flops_per_token(n) for n in (1000, 2000, 3000)]
    assert rates[2] - rates[1] == pytest.approx(rates[1] - rates[0])
    assert rates[1] - rates[0] == pytest.approx(12 * 500 * 64)  # one attention layer


# -- parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        DEBUG,
        replace(DEBUG, tied_embeddings=True, layers=12, window=5, window_from=11),
        replace(DEBUG, head_dim=32, kv_heads=1, layers=1),
        replace(DEBUG, qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True, layers=1),
        GPTConfig(dim=8, layers=11, heads=2, vocab_size=7, max_positions=9),
        replace(LATENT, layers=11),
        DIRECT,
        replace(HYBRID, layers=8),
        replace(HYBRID, layers=8, tied_embeddings=True),
    ],
)
def test_shapes_and_parameter_counts_match_the_module(config):
    expected = {name: tuple(tensor.shape) for name, tensor in meta_model(config).state_dict().items()}
    assert parameter_shapes(meta_model, config) == expected
    assert sum(map(math.prod, expected.values())) == config.parameters()


def test_mixers_alternate():
    config = replace(HYBRID, layers=8)
    assert config.mixer_counts() == {"delta_rule": 3, "mamba2": 3, "attention": 2}
    assert [config.mixer_of(i) for i in range(4)] == ["delta_rule", "mamba2", "attention", "delta_rule"]
