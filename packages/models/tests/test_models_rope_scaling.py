"""RoPE scalings: transformers' frequencies and factors in float64, and refusals by name."""

import pytest
import torch

from armillary.models import LinearScaling, Llama3Scaling, YarnScaling
from armillary.models.layers.rope import RotaryEmbedding, plain_frequencies

LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "kind, scaling, options",
    [
        ("linear", LinearScaling, {"factor": 2.5}),
        ("llama3", Llama3Scaling, LLAMA31),
        ("llama3", Llama3Scaling, LLAMA31 | {"factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 9.0}),
        ("llama3", Llama3Scaling, LLAMA31 | {"original_max_position_embeddings": 16}),
        ("yarn", YarnScaling, YARN),
        ("yarn", YarnScaling, YARN | {"truncate": False}),
        ("yarn", YarnScaling, YARN | {"attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0}),
        ("yarn", YarnScaling, YARN | {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3}),
        ("yarn", YarnScaling, YARN | {"factor": 1.0}),
        ("yarn", YarnScaling, YARN | {"original_max_position_embeddings": 2}),
    ],
)
def test_frequencies_and_factors_match_transformers(kind, scaling, options):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for head_dim, theta in ((128, 500_000.0), (64, 10_000.0), (16, 1_000_000.0)):
        config = transformers.LlamaConfig(
            hidden_size=2 * head_dim,
            num_attention_heads=2,
            max_position_embeddings=131_072,
            rope_parameters={"rope_type": kind, "rope_theta": theta, **options},
        )
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config)
        rope_scaling = scaling(**options)
        frequencies = rope_scaling.frequencies(head_dim, theta)
        assert frequencies.dtype == torch.float64
        torch.testing.assert_close(frequencies.float(), expected, rtol=2e-6, atol=0)
        assert rope_scaling.amplitude == pytest.approx(factor, rel=1e-12)


def test_llama31_keeps_high_frequencies_and_divides_low_ones_by_8():
    scaled, plain = Llama3Scaling(**LLAMA31).frequencies(128, 5e5), plain_frequencies(128, 5e5)
    assert torch.equal(scaled[:20], plain[:20])
    torch.testing.assert_close(scaled[-20:], plain[-20:] / 8, rtol=1e-15, atol=0)
    assert ((scaled / plain).diff() <= 1e-15).all()


def test_cosines_and_sines_are_multiplied_by_the_amplitude():
    scaling, positions = YarnScaling(**YARN), torch.tensor([0, 3, 5_000_000])
    rotation = RotaryEmbedding.at(positions, 16, 1e4, torch.float64, scaling)
    angles = positions[:, None, None] * scaling.frequencies(16, 1e4)
    assert scaling.amplitude > 1.1
    torch.testing.assert_close(rotation.cos, angles.cos() * scaling.amplitude, rtol=0, atol=0)
    torch.testing.assert_close(rotation.sin, angles.sin() * scaling.amplitude, rtol=0, atol=0)
