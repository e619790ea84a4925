"""RoPE: equal to complex multiplication, relative, and exact at positions in the millions."""

import math

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from armillary.models import YarnScaling
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


@pytest.mark.parametrize("positions", [torch.arange(5) * 1000, torch.arange(10).view(2, 5)], ids=["of all", "of rows"])
@pytest.mark.parametrize(
    "scaling", [None, YarnScaling(factor=4.0, original_max_position_embeddings=64)], ids=["plain", "with an amplitude"]
)
def test_backward_rotates_gradients_back(positions, scaling):
    rotation = RotaryEmbedding.at(positions, D, THETA, torch.float64, scaling)
    x = torch.randn(2, 5, 3, D, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(rotation(x), reference(x, rotation), rtol=0, atol=1e-14)
    weight = torch.randn_like(x)
    actual, expected = (torch.autograd.grad((y * weight).sum(), x)[0] for y in (rotation(x), reference(x, rotation)))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(rotation, x) and torch.autograd.gradgradcheck(rotation, x)


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


def test_a_compiled_rotation_is_one_graph():
    rotation = RotaryEmbedding.at(torch.arange(4), D, THETA, torch.float32)
    compiled = torch.compile(lambda x: rotation(x).sin(), fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (1, 2, 3):
        x = torch.randn(batch, 4, 2, D, requires_grad=True)
        actual, expected = compiled(x), reference(x, rotation).sin()
        torch.testing.assert_close(actual, expected)
        pair = [torch.autograd.grad(y.sum(), x)[0] for y in (actual, expected)]
        torch.testing.assert_close(*pair)


def test_rotation_supports_torch_func():
    rotation, x = RotaryEmbedding.at(torch.arange(4), D, THETA, torch.float64), torch.randn(3, 2, 4, 2, D).double()
    torch.testing.assert_close(torch.vmap(rotation)(x), torch.stack([rotation(row) for row in x]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_the_cpu():
    x, positions = torch.randn(1, 3, 2, D), torch.tensor([0, 4_999_999, 5_000_000])
    torch.testing.assert_close(rotate(x.cuda(), positions.cuda()).cpu(), rotate(x, positions), rtol=0, atol=1e-5)
