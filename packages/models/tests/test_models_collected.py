"""Weight gradients of projections, accumulated in place over groups of heads and chunks of tokens."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from armillary.attention import Projected
from armillary.attention.parts import GradientSums
from armillary.core.testing import mesh, relative_error
from armillary.models.parallel.tensor_parallelism import ColumnParallelLinear, shard_module
from armillary.models.parts import HeadProjections

B, T, E, H, K, D = 2, 11, 12, 6, 3, 4
STAGES = [((0, 1), (0, 1, 2)), ((2, 4), None), ((5, 3), None)]
"""Heads of each stage: adjacent, evenly spaced, and unordered."""


def build(dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    query, key, value = (nn.Linear(E, heads * D, bias=bias, dtype=dtype) for heads in (H, K, K))
    return HeadProjections(query, key, value, H, K, D, query_norm=nn.RMSNorm(D, dtype=dtype))


def in_stages(projections, x, grads, frozen=(), dx=True):
    """Returns (dx, gradients of the unfrozen parameters), computed in stages and chunks of three tokens."""
    parameters = [p for p in projections.parameters() if not any(p is f for f in frozen)]
    totals, dx = GradientSums(parameters), torch.zeros_like(x) if dx else None
    source = Projected(x, projections, 3, dx, totals)
    for queries, keys in STAGES:
        source.add_q(queries, [grads[0][:, :, list(queries)]])
        if keys:
            source.add_kv(keys, *grads[1:])
    return dx, dict(zip(map(id, parameters), totals.result(), strict=True))


def by_autograd(projections, x, grads):
    x = x.detach().requires_grad_()
    outputs = projections.q(x, range(H)), *projections.kv(x, range(K))
    parameters = [*projections.parameters()]
    dx, *gradients = torch.autograd.grad(outputs, [x, *parameters], grads)
    return dx, dict(zip(map(id, parameters), gradients, strict=True))


def random_grads(dtype):
    return [torch.randn(B, T, heads, D, dtype=dtype) for heads in (H, K, K)]


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_stages_and_chunks_add_up(bias):
    projections, x, grads = build(bias=bias), torch.randn(B, T, E).double(), random_grads(torch.float64)
    (dx, result), (expected_dx, expected) = (run(projections, x, grads) for run in (in_stages, by_autograd))
    assert relative_error(dx, expected_dx) < 1e-14 and result.keys() == expected.keys()
    assert max(relative_error(result[name], expected[name]) for name in expected) < 1e-14


def test_only_frozen_parameters_get_no_gradient_without_dx():
    projections, x, grads = build(), torch.randn(B, T, E).double(), random_grads(torch.float64)
    _, expected = by_autograd(projections, x, grads)
    frozen = [projections.query.weight, projections.key.bias]
    for parameter in frozen:
        parameter.requires_grad_(False)
    _, result = in_stages(projections, x, grads, frozen, dx=False)
    assert len(result) == len(expected) - 2
    assert max(relative_error(gradient, expected[name]) for name, gradient in result.items()) < 1e-14


def test_sums_are_rounded_once():
    """Chunks of three tokens are summed in float32: bfloat16 would round each product."""
    projections, x = build(torch.bfloat16, bias=False), torch.randn(B, T, E).bfloat16()
    grads = random_grads(torch.bfloat16)
    _, result = in_stages(projections, x, grads)
    value = grads[2].flatten(2).double().flatten(0, 1).T @ x.double().flatten(0, 1)
    assert torch.equal(result[id(projections.value.weight)], value.float().bfloat16())


def test_an_adapter_is_differentiated_unchanged():
    projections, x, grads = build(), torch.randn(B, T, E).double(), random_grads(torch.float64)
    adapter = nn.Linear(E, H * D, bias=False, dtype=torch.float64)
    projections.query.register_module("adapter", adapter)
    projections.query.forward = lambda x: nn.functional.linear(x, projections.query.weight) + 2 * adapter(x)
    (_, result), (_, expected) = (run(projections, x, grads) for run in (in_stages, by_autograd_unused))
    assert (
        max(relative_error(result[name], gradient) for name, gradient in expected.items() if gradient is not None)
        < 1e-14
    )
    assert expected[id(adapter.weight)].any()


def by_autograd_unused(projections, x, grads):
    outputs = projections.q(x, range(H)), *projections.kv(x, range(K))
    parameters = [*projections.parameters()]
    gradients = torch.autograd.grad(outputs, parameters, grads, allow_unused=True)
    return None, dict(zip(map(id, parameters), gradients, strict=True))


def errors_under_tensor_parallelism():
    """Errors of this rank's gradients when tensor parallelism shards heads over two ranks."""
    full, axis = build(), mesh(tp=2)["tp"]
    x, grads = torch.randn(B, T, E).double(), random_grads(torch.float64)
    _, expected = by_autograd_unused(full, x, grads)
    expected = [expected[id(parameter)] for parameter in (full.query.weight, full.query.bias)]
    local_query = shard_module(full.query, ColumnParallelLinear, axis, {"weight": Shard(0), "bias": Shard(0)})
    totals = GradientSums([local_query._parameters["weight"], local_query._parameters["bias"]])
    source = Projected(x, replace(full, query=local_query, heads=H // 2), 4, None, totals)
    for heads in ((0, 2), (1,)):
        local_heads = [3 * dist.get_rank() + head for head in heads]
        source.add_q(heads, [grads[0][:, :, local_heads]])
    return [relative_error(gradient.full_tensor(), e) for gradient, e in zip(totals.result(), expected, strict=True)]


def test_gradients_of_sharded_weights_are_sharded(worlds):
    for errors in worlds(2).run(errors_under_tensor_parallelism):
        assert max(errors) < 1e-14
