"""Initial weights: functions of seed and name alone, with the expected deviations. Forward under FSDP2."""

from dataclasses import replace

import pytest
import torch
from hub_folders import attend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from armillary.attention import AttentionMask
from armillary.core import SequenceLayout
from armillary.core.testing import mesh
from armillary.models import Llama, LlamaConfig, initialize

SMALL = LlamaConfig(vocab_size=11, dim=6, layers=3, heads=3, kv_heads=3, hidden_dim=10)


def plain(config: LlamaConfig, seed: int = 0) -> Llama:
    model = Llama(config, attend)
    initialize(model, seed)
    return model


def inputs_of_a_block() -> tuple[torch.dtype, torch.dtype, bool, bool]:
    model = plain(SMALL)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh(shard=2)["shard"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    block_inputs = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: block_inputs.append(args))
    mask, layout = AttentionMask(documents=[0, 4, 6]), SequenceLayout.contiguous(6, 1)
    model(torch.arange(6)[None], positions=torch.arange(6), mask=mask, layout=layout)
    x, context = block_inputs[0]
    return x.dtype, context.rotation.cos.dtype, context.mask == mask, context.layout is layout


def test_fsdp_mixed_precision_keeps_rotation_mask_and_layout(worlds):
    assert worlds(2).run(inputs_of_a_block) == [(torch.bfloat16, torch.float32, True, True)] * 2


def test_a_weight_depends_on_the_seed_and_its_name_only():
    first, repeated, other = (dict(plain(SMALL, seed).named_parameters()) for seed in (5, 5, 6))
    matrices = [name for name in first if first[name].ndim == 2]
    assert all(torch.equal(first[name], repeated[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])
    few = plain(replace(SMALL, layers=1), seed=5)
    assert torch.equal(few.state_dict()[matrices[1]], first[matrices[1]]) and "layers.0" in matrices[1]


def test_deviations_of_weights_and_norms_of_one():
    model = plain(replace(LlamaConfig.debug(), layers=8))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.05), name
            assert abs(parameter.mean().item()) < 1e-3, name


def test_dtypes_change_no_number():
    """Neither the model's dtype, in which the numbers are rounded, nor torch's default."""
    expected = dict(plain(SMALL).named_parameters())
    for dtype in (torch.bfloat16, torch.float64):
        model, default_model = Llama(SMALL, attend).to(dtype), Llama(SMALL, attend)
        initialize(model, seed=0)
        torch.set_default_dtype(dtype)
        try:
            initialize(default_model, seed=0)
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(torch.equal(p, expected[name].to(dtype)) for name, p in model.named_parameters())
        assert all(torch.equal(p, expected[name]) for name, p in default_model.named_parameters())


def test_wrapping_blocks_changes_no_weight():
    model = Llama(SMALL, attend)
    for i, block in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(block)
    initialize(model, seed=0)
    assert all(torch.equal(model.state_dict()[name], p) for name, p in plain(SMALL).named_parameters())
