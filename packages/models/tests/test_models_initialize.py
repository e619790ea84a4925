"""Initial weights: equal on every mesh, with the expected deviations. Forward under FSDP2."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from armillary.attention import AttentionMask
from armillary.core import SequenceLayout
from armillary.core.testing import mesh, relative_error
from armillary.models import Llama, LlamaConfig, initialize, parallelize

# 3 key/value heads of 2 and an MLP of 10 leave uneven shards, and empty ones, on 4 ranks.
SMALL = LlamaConfig(vocab_size=11, dim=6, layers=3, heads=3, kv_heads=3, hidden_dim=10)
TIED = replace(SMALL, tied_embeddings=True)
IDS = torch.arange(10)[None]


def attend(q, k, v, *, mask, layout):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def plain(config: LlamaConfig, seed: int = 0) -> Llama:
    model = Llama(config, attend)
    initialize(model, seed)
    return model


def sharded(config: LlamaConfig, over: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> Llama:
    with torch.device("meta"):
        model = Llama(config, attend)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=over, mp_policy=policy or MixedPrecisionPolicy())
    model.to_empty(device="cpu")
    initialize(model, seed=0)
    return model


MESHES = [
    ({"shard": 4}, ("shard",), SMALL),
    ({"shard": 2, "ring": 2}, ("shard",), TIED),
    ({"replicate": 2, "shard": 2}, ("replicate", "shard"), TIED),
]


def full_weights() -> list[dict[str, torch.Tensor]]:
    actual = []
    for axes, over, config in MESHES:
        parameters = dict(sharded(config, mesh(**axes)[over]).named_parameters())
        assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
        actual.append({name: parameter.full_tensor().detach() for name, parameter in parameters.items()})
    return actual


def test_weights_are_bit_identical_on_every_mesh(worlds):
    for rank in worlds(4).run(full_weights):
        for (*_, config), weights in zip(MESHES, rank, strict=True):
            expected = dict(plain(config).named_parameters())
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], expected[name]) for name in expected)


UNEVEN = [replace(SMALL, vocab_size=vocabulary, heads=2, kv_heads=2) for vocabulary in (5, 9)]
"""Over 2 ranks and then 4: 1, 1, 1, 0, 1, 1, 0, 0 rows; and 2, 2, 1, 0, 1, 1, 1, 1."""


def under_tensor_parallelism() -> list[dict[str, torch.Tensor]]:
    actual = []
    for config in UNEVEN:
        with torch.device("meta"):
            model = Llama(config, attend)
        parallelize(model, mesh(shard=2, ring=2, tp=2))
        model.to_empty(device="cpu")
        initialize(model, seed=0)
        actual.append({name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()})
    return actual


def test_weights_are_bit_identical_under_uneven_tensor_parallelism(worlds):
    for rank in worlds(8).run(under_tensor_parallelism):
        for config, weights in zip(UNEVEN, rank, strict=True):
            expected = dict(plain(config).named_parameters())
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], expected[name]) for name in expected)


def losses_and_gradients() -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    actual = []
    for config in (SMALL, TIED):
        model = sharded(config, mesh(shard=4)["shard"])
        # All ranks have the same rows, so FSDP's average is one rank's gradient.
        loss = model(IDS, head=lambda hidden, weight: F.linear(hidden, weight).logsumexp(-1).sum())
        loss.backward()
        actual.append((loss.detach(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}))
    return actual


def test_a_head_inside_forward_gets_the_gathered_weight_under_fsdp(worlds):
    ranks = worlds(4).run(losses_and_gradients)
    for i, config in enumerate((SMALL, TIED)):
        model = plain(config)
        expected = model(IDS).logsumexp(-1).sum()
        expected.backward()
        for loss, gradients in (rank[i] for rank in ranks):
            assert relative_error(loss, expected) < 1e-6
            for name, parameter in model.named_parameters():
                assert relative_error(gradients[name], parameter.grad) < 1e-5, name


def inputs_of_a_block() -> tuple[torch.dtype, torch.dtype, bool, bool]:
    model = sharded(SMALL, mesh(shard=4)["shard"], MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    block_inputs = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: block_inputs.append(args))
    mask, layout = AttentionMask(documents=[0, 4, 6]), SequenceLayout.contiguous(6, 1)
    model(torch.arange(6)[None], positions=torch.arange(6), mask=mask, layout=layout)
    x, context = block_inputs[0]
    return x.dtype, context.rotation.cos.dtype, context.mask == mask, context.layout is layout


def test_fsdp_mixed_precision_keeps_rotation_mask_and_layout(worlds):
    assert worlds(4).run(inputs_of_a_block) == [(torch.bfloat16, torch.float32, True, True)] * 4


def test_weights_depend_on_the_seed():
    first, repeated, other = (dict(plain(SMALL, seed).named_parameters()) for seed in (5, 5, 6))
    matrices = [name for name in first if first[name].ndim == 2]
    assert all(torch.equal(first[name], repeated[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])


def test_a_parameter_depends_only_on_its_name():
    few, many = plain(replace(SMALL, layers=1)), plain(SMALL)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(few.get_parameter(name), many.get_parameter(name))


def test_deviations_of_weights_and_norms_of_one():
    model = plain(replace(LlamaConfig.debug(), layers=8))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.05), name
            assert abs(parameter.mean().item()) < 1e-3, name


def test_other_dtypes_get_the_same_numbers_rounded():
    expected = dict(plain(SMALL).named_parameters())
    for dtype in (torch.bfloat16, torch.float64):
        model = Llama(SMALL, attend).to(dtype)
        initialize(model, seed=0)
        assert all(torch.equal(p, expected[name].to(dtype)) for name, p in model.named_parameters())


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_no_weight(default):
    expected, model = dict(plain(SMALL).named_parameters()), Llama(SMALL, attend)
    torch.set_default_dtype(default)
    try:
        initialize(model, seed=0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


def test_wrapping_blocks_changes_no_weight():
    model = Llama(SMALL, attend)
    for i, block in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(block)
    initialize(model, seed=0)
    assert all(torch.equal(model.state_dict()[name], p) for name, p in plain(SMALL).named_parameters())
