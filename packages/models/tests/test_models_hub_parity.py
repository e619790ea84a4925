"""Logits and gradients equal transformers' for every option, for folders written by either library and read by both."""

import json
from dataclasses import replace

import pytest
import torch
from latent_models import LATENT, SIZES

from armillary.core.testing import relative_error
from armillary.models import GPT, GPTConfig, LinearScaling, Llama, Llama3Scaling, LlamaConfig, YarnScaling, initialize

transformers = pytest.importorskip("transformers")

N = 48
LLAMA = LlamaConfig(
    vocab_size=37, dim=24, layers=3, heads=4, kv_heads=2, hidden_dim=40, rope_theta=777.0, max_positions=64
)
YOUTU = replace(LATENT, norm_eps=1e-3, rope_theta=777.0, max_positions=64)
QWEN2, QWEN3 = replace(LLAMA, qkv_bias=True), replace(LLAMA, qk_norm=True)
ORIGINAL = {"factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = Llama3Scaling(low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL)
BETAS = YarnScaling(beta_fast=4.0, beta_slow=0.5, truncate=False, attention_factor=0.8, **ORIGINAL)
CASES = {  # independent options share a case
    "llama": ("llama", LLAMA),
    "llama tied head_dim biases": (
        "llama",
        replace(LLAMA, tied_embeddings=True, head_dim=10, qkv_bias=True, out_bias=True, mlp_bias=True),
    ),
    "llama3": ("llama", replace(LLAMA, kv_heads=1, norm_eps=0.3, rope_scaling=LLAMA3)),
    "linear": ("llama", replace(LLAMA, kv_heads=4, rope_scaling=LinearScaling(factor=3.0))),
    "yarn factor betas": ("llama", replace(LLAMA, rope_scaling=BETAS)),
    "yarn mscale": ("llama", replace(LLAMA, rope_scaling=YarnScaling(mscale=2.0, mscale_all_dim=0.5, **ORIGINAL))),
    "mistral odd width": ("mistral", replace(LLAMA, dim=26, head_dim=8)),
    "mistral window llama3": ("mistral", replace(LLAMA, window=5, head_dim=8, rope_scaling=LLAMA3)),
    "qwen2 tied head_dim yarn": (
        "qwen2",
        replace(QWEN2, tied_embeddings=True, head_dim=10, rope_scaling=YarnScaling(**ORIGINAL)),
    ),
    "qwen2 window": ("qwen2", replace(QWEN2, window=7)),
    "qwen2 window from 2": ("qwen2", replace(QWEN2, window=7, window_from=2)),
    "qwen3 tied head_dim llama3": ("qwen3", replace(QWEN3, head_dim=12, tied_embeddings=True, rope_scaling=LLAMA3)),
    "qwen3 biases window from 1": ("qwen3", replace(QWEN3, qkv_bias=True, out_bias=True, window=6, window_from=1)),
    "youtu": ("youtu", YOUTU),
    "youtu direct queries halves yarn": (
        "youtu",
        replace(
            YOUTU,
            latent=replace(SIZES, query_rank=None, interleaved=False),
            tied_embeddings=True,
            rope_scaling=YarnScaling(mscale=2.0, mscale_all_dim=0.5, **ORIGINAL),
        ),
    ),
    "gpt2 eps": ("gpt2", GPTConfig(vocab_size=37, dim=24, layers=2, heads=2, max_positions=64, norm_eps=0.3)),
}
IDS = torch.randint(37, (2, N), generator=torch.Generator().manual_seed(0))


def build(config):
    """A float64 model whose logits depend on every parameter."""
    model = (Llama(config) if isinstance(config, LlamaConfig) else GPT(config)).double()
    initialize(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def gradients(model, logits):
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits.backward(direction)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_those_of_transformers_in_both_directions(case, tmp_path):
    kind, config = CASES[case]
    model = build(config)
    model.save_pretrained(tmp_path / "ours")
    fields = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert fields["model_type"] == kind

    reference, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert fields["architectures"] == [type(reference).__name__]
    assert not any(loaded[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    # Their norms and angles are float32 in any model.
    expected, result = reference.eval()(IDS).logits, model(IDS)
    assert relative_error(result, expected) < 2e-6
    if kind != "gpt2":  # which fuses projections and transposes weights
        exact = gradients(reference, expected)
        for name, gradient in gradients(model, result).items():
            assert relative_error(gradient, exact[name]) < 2e-6, name

    reference.save_pretrained(tmp_path / "theirs")
    reloaded = type(model).from_pretrained(tmp_path / "theirs")
    assert reloaded.config == config
    assert torch.equal(reloaded(IDS), result)
