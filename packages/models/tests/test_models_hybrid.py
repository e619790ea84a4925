"""Gated DeltaNet and Mamba-2 equal transformers' layers, gradients included."""

import pytest
import torch
from hybrid_models import STATES
from torch import Tensor

from armillary.attention import AttentionMask
from armillary.core.testing import relative_error
from armillary.models.layers.state_mixers import GatedDeltaNet, Mamba2, StateMixer


def errors(module: StateMixer, reference: torch.nn.Module, dim: int) -> tuple[float, float]:
    """Returns the errors of the output and of the input's gradient; transformers computes in float32."""
    x = torch.randn(2, 70, dim, requires_grad=True)
    actual = module.o_proj(module(x, mask=AttentionMask(causal=True), layout=None).flatten(-2))
    expected, direction = reference(x), torch.randn(2, 70, dim)
    gradients = [torch.autograd.grad(y, x, direction)[0] for y in (actual, expected)]
    return relative_error(actual, expected), relative_error(*gradients)


def randomize(reference: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0, 0.5)
    return reference


def copy_(module: torch.nn.Module, **weights: Tensor) -> None:
    for name, weight in weights.items():
        getattr(module, name).weight.data.copy_(weight)


def test_gated_delta_net_equals_qwen3_next():
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = modeling.Qwen3NextConfig(
        hidden_size=12,
        num_hidden_layers=1,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=6,
        linear_value_head_dim=5,
        rms_norm_eps=1e-5,
        layer_types=["linear_attention"],
    )
    reference, module = randomize(modeling.Qwen3NextGatedDeltaNet(config, 0)), GatedDeltaNet(12, STATES, 1e-5, None)
    # transformers interleaves rows by key head: q, k, then v and z of its value heads.
    q, k, v, z = reference.in_proj_qkvz.weight.unflatten(0, (2, -1)).split([6, 6, 10, 10], 1)
    b, a = reference.in_proj_ba.weight.unflatten(0, (2, -1)).split([2, 2], 1)
    copy_(module, **{f"{n}_proj": w.flatten(0, 1) for n, w in zip("qkvzba", (q, k, v, z, b, a), strict=True)})
    copy_(
        module,
        **dict(zip(("q_conv1d", "k_conv1d", "v_conv1d"), reference.conv1d.weight.split([12, 12, 20]), strict=True)),
    )
    copy_(module, norm=reference.norm.weight, o_proj=reference.out_proj.weight)
    module.A_log.data.copy_(reference.A_log)
    module.dt_bias.data.copy_(reference.dt_bias)
    output_error, gradient_error = errors(module, reference, 12)
    assert output_error < 1e-5 and gradient_error < 1e-4


def test_mamba2_equals_transformers():
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = modeling.Mamba2Config(
        hidden_size=10, num_heads=4, head_dim=5, expand=2, state_size=6, n_groups=2, num_hidden_layers=1, use_bias=False
    )
    reference, module = randomize(modeling.Mamba2Mixer(config, 0)), Mamba2(10, STATES, 1e-5, None)
    z, v, k, q, a = reference.in_proj.weight.split([20, 20, 12, 12, 4])
    copy_(module, **{f"{n}_proj": w for n, w in zip("zvkqa", (z, v, k, q, a), strict=True)})
    for name, weight, bias in zip(
        "vkq", *(x.split([20, 12, 12]) for x in (reference.conv1d.weight, reference.conv1d.bias)), strict=True
    ):
        copy_(module, **{f"{name}_conv1d": weight})
        getattr(module, f"{name}_conv1d").bias.data.copy_(bias)
    copy_(module, o_proj=reference.out_proj.weight)
    for name, parameter in (
        ("A_log", reference.A_log),
        ("dt_bias", reference.dt_bias),
        ("D", reference.D),
        ("norm_weight", reference.norm.weight),
    ):
        getattr(module, name).data.copy_(parameter)
    output_error, gradient_error = errors(module, reference, 10)
    assert output_error < 1e-5 and gradient_error < 1e-4
