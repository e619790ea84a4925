"""RoPE: equal to complex multiplication, exact at positions in the millions, scaled as in transformers."""

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


def test_rotation_is_complex_multiplication_of_dims_i_and_i_plus_half():
    x = torch.randn(2, 5, 3, D, dtype=torch.float64)
    positions = torch.tensor([7, 0, 3, 100, 41])
    angles = positions[:, None, None] * torch.tensor(frequencies(), dtype=torch.float64)
    expected = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotate(x, positions), torch.cat([expected.real, expected.imag], -1), rtol=0, atol=1e-14)


def test_scores_depend_only_on_the_distance():
    q, k = torch.randn(2, 1, 1, 1, D, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        return (rotate(q, torch.tensor([i])) * rotate(k, torch.tensor([j]))).sum().item()

    assert score(9, 4) == pytest.approx(score(1_009, 1_004), abs=1e-12)
    assert score(9, 4) == pytest.approx(score(5_000_009, 5_000_004), abs=1e-7)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


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


def test_bfloat16_outputs_are_rounded_once():
    x = torch.randn(1, 4, 2, D).bfloat16()
    positions = torch.arange(4) + 1000
    assert torch.equal(rotate(x, positions), rotate(x.float(), positions).bfloat16())


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


def test_bfloat16_gradients_are_rounded_once():
    rotation, dy = RotaryEmbedding.at(torch.arange(4) + 1000, D, THETA, torch.bfloat16), torch.randn(1, 4, 2, D)
    low, high = (torch.zeros(1, 4, 2, D, dtype=dtype, requires_grad=True) for dtype in (torch.bfloat16, torch.float32))
    (actual,) = torch.autograd.grad(rotation(low), low, dy.bfloat16())
    (expected,) = torch.autograd.grad(rotation(high), high, dy.bfloat16().float())
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
