"""RoPE: exact at positions in the millions, differentiated, and scaled as in transformers."""

import math
from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from armillary.models import LinearScaling, Llama3Scaling, YarnScaling
from armillary.models.layers.rope import RotaryEmbedding

D, THETA = 16, 500_000.0


def frequencies() -> list[float]:
    return [THETA ** (-2 * i / D) for i in range(D // 2)]


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return RotaryEmbedding.at(positions, D, THETA, x.dtype)(x)


def test_float32_is_exact_at_position_five_million():
    position = 5_000_000
    rotation = RotaryEmbedding.at(torch.tensor([position]), D, THETA, torch.bfloat16)
    cos = torch.tensor([math.cos(position * f) for f in frequencies()])
    sin = torch.tensor([math.sin(position * f) for f in frequencies()])
    assert rotation.cos.dtype == rotation.sin.dtype == torch.float32
    torch.testing.assert_close(rotation.cos.flatten(), cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(rotation.sin.flatten(), sin, rtol=0, atol=1e-6)
    careless = (torch.tensor([float(position)]) * torch.tensor(frequencies(), dtype=torch.float32)).cos()
    assert (careless - cos).abs().max() > 1e-2


def reference(x: torch.Tensor, rotation: RotaryEmbedding) -> torch.Tensor:
    """RoPE written as separate products, differentiated by autograd."""
    (a, b), cos, sin = x.chunk(2, -1), rotation.cos, rotation.sin
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def test_gradients_of_gradients_equal_those_of_separate_products():
    amplified = YarnScaling(factor=4.0, original_max_position_embeddings=64)
    for positions, scaling in [(torch.arange(5) * 1000, None), (torch.arange(10).view(2, 5), amplified)]:
        rotation = RotaryEmbedding.at(positions, D, THETA, torch.float64, scaling)
        x, weight, upstream = torch.randn(3, 2, 5, 3, D, dtype=torch.float64).unbind()
        x.requires_grad_()
        weight.requires_grad_()

        def values_and_gradients(function, x=x, weight=weight, upstream=upstream):
            y = function(x)
            (dx,) = torch.autograd.grad((y * weight).sum(), x, create_graph=True)
            return y, dx, *torch.autograd.grad((dx * upstream).sum(), weight)

        expected = values_and_gradients(partial(reference, rotation=rotation))
        torch.testing.assert_close(values_and_gradients(rotation), expected, rtol=0, atol=1e-14)


def test_bfloat16_outputs_and_gradients_are_rounded_once():
    rotation = RotaryEmbedding.at(torch.arange(4) + 1000, D, THETA, torch.bfloat16)
    x, dy = torch.randn(2, 1, 4, 2, D).bfloat16().unbind()
    low, high = (x.to(dtype).requires_grad_() for dtype in (torch.bfloat16, torch.float32))
    outputs = rotation(low), rotation(high)
    gradients = torch.autograd.grad(outputs[0], low, dy)[0], torch.autograd.grad(outputs[1], high, dy.float())[0]
    for actual, expected in (outputs, gradients):
        assert torch.equal(actual, expected.bfloat16())


def test_backward_saves_only_cosines_and_sines():
    saved_shapes, x = list[torch.Size](), torch.randn(2, 4, 3, D, requires_grad=True)
    with saved_tensors_hooks(lambda saved: saved_shapes.append(saved.shape), lambda _: None):
        rotate(x, torch.arange(4))
    assert saved_shapes == [(4, 1, D // 2)] * 2


def test_rotation_supports_torch_func():
    rotation, x = RotaryEmbedding.at(torch.arange(4), D, THETA, torch.float64), torch.randn(3, 2, 4, 2, D).double()
    torch.testing.assert_close(torch.vmap(rotation)(x), torch.stack([rotation(row) for row in x]))


# -- scalings ---------------------------------------------------------------------------------------------------------

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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_the_cpu():
    x, positions = torch.randn(1, 3, 2, D), torch.tensor([0, 4_999_999, 5_000_000])
    torch.testing.assert_close(rotate(x.cuda(), positions.cuda()).cpu(), rotate(x, positions), rtol=0, atol=1e-5)
