"""torch.compile: one graph per block, shared by all layers, bitwise equal to eager mode."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from armillary.attention import AttentionMask, Local, Method, UPipe
from armillary.core import Axis
from armillary.core.testing import relative_error
from armillary.models import GPT, Checkpointing, GPTConfig, Llama, LlamaConfig, initialize
from armillary.models.parallel.parallelize import compile_block

SMALL = LlamaConfig(vocab_size=29, dim=16, layers=3, heads=4, kv_heads=2, hidden_dim=24, qk_norm=True, qkv_bias=True)
CONFIGS = {
    "windows": replace(SMALL, window=5, window_from=1),
    "gpt": GPTConfig(vocab_size=29, dim=16, layers=2, heads=4, max_positions=32),
}
MASKS = [AttentionMask(), AttentionMask(documents=[0, 5, 24]), AttentionMask(documents=[0, 3, 9, 24])]


def reset_dynamo() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def staged() -> Method:
    return UPipe(Axis.alone("ulysses"), heads_per_stage=2)


def pair(config: LlamaConfig | GPTConfig, attention: Method, policy: Checkpointing) -> tuple[Llama | GPT, Llama | GPT]:
    """Returns a model and a copy with compiled blocks."""
    model = Llama(config, attention) if isinstance(config, LlamaConfig) else GPT(config, attention)
    initialize(model, 0)
    policy.apply(model)
    twin = copy.deepcopy(model)
    for block in (twin.model if isinstance(twin, Llama) else twin.transformer).blocks:
        compile_block(block, "aot_eager", fullgraph=True)
    return model, twin


def results(model: Llama | GPT, mask: AttentionMask) -> list[Tensor | None]:
    model.zero_grad()
    logits = model(torch.arange(48).view(2, 24) % 29, mask=mask)
    logits.sin().sum().backward()
    return [logits, *(parameter.grad for parameter in model.parameters())]


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b is None or (a is not None and b is not None and torch.equal(a, b))


@pytest.mark.parametrize(("name", "attention"), [("windows", staged), ("gpt", Local)])
def test_layers_and_masks_share_a_few_graphs(name, attention):
    reset_dynamo()
    model, twin = pair(CONFIGS[name], attention(), Checkpointing())
    for mask in MASKS:
        assert all(same(a, b) for a, b in zip(results(model, mask), results(twin, mask), strict=True))
    # One graph without documents, one with a fixed number, one with a symbolic number; the same for each window. One
    # graph per layer would exceed these limits.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= (6 if name == "windows" else 3)


def test_the_token_wise_part_is_compiled_under_a_checkpoint_policy():
    """Of three blocks, the first saves x on the host, the second out, and the last both on the device."""
    reset_dynamo()
    policy = Checkpointing("attention_output", chunk=7, inputs=2, outputs=2, offload=True, on_device=1)
    model, twin = pair(SMALL, staged(), policy)
    actual = results(twin, MASKS[1])
    Checkpointing("layer", chunk=7).apply(model)
    assert all(same(a, b) for a, b in zip(results(model, MASKS[1]), actual, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


FROZEN = ("layers.0.self_attn.q_proj", "layers.0.self_attn.k_norm", "layers.0.input_layernorm", "layers.1.self_attn")


def test_frozen_parameters_get_no_gradient():
    reset_dynamo()
    model, twin = pair(replace(SMALL, layers=2), staged(), Checkpointing())
    for each in (model, twin):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(not any(frozen in name for frozen in FROZEN))
    actual, expected = results(twin, MASKS[0]), results(model, MASKS[0])
    assert sum(gradient is None for gradient in actual) == sum(not p.requires_grad for p in model.parameters()) > 4
    for a, b in zip(expected, actual, strict=True):
        assert same(a, b)


@pytest.mark.parametrize("policy", ["none", "layer"])
@torch.no_grad()
def test_a_copy_of_a_compiled_model_has_its_own_parameters(policy):
    reset_dynamo()
    originals = pair(replace(SMALL, layers=1), staged(), Checkpointing(policy))
    other, ids = copy.deepcopy(originals[1]), torch.arange(48).view(2, 24) % 29
    before = other(ids)
    for original in originals:
        for parameter in original.parameters():
            parameter.zero_()
    assert torch.equal(other(ids), before)


def test_autocast_equals_eager_mode():
    reset_dynamo()
    model, twin = pair(replace(SMALL, layers=1), staged(), Checkpointing())
    with torch.autocast("cpu", torch.bfloat16):
        actual = [results(each, MASKS[1]) for each in (model, twin)]
    for a, b in zip(*actual, strict=True):
        assert a is not None and b is not None
        assert relative_error(b.detach(), a.detach()) < 2e-2
    assert actual[0][0].dtype == actual[1][0].dtype


def test_adapters_with_dropout_run_outside_of_graphs():
    actual: list[list[Tensor | None]] = []
    for fullgraph in (None, False, True):
        reset_dynamo()
        model = Llama(replace(SMALL, layers=1), staged())
        initialize(model, 0)
        block = model.model.layers[0]
        block.self_attn.q_proj = nn.Sequential(block.self_attn.q_proj, nn.Dropout(0.5))
        if fullgraph is not None:
            compile_block(block, "aot_eager", fullgraph)
        torch.manual_seed(0)
        if fullgraph:
            with pytest.raises(Exception, match="stages of heads"):
                results(model, MASKS[0])
            break
        actual.append(results(model, MASKS[0]))
    for a, b in zip(*actual, strict=True):
        assert a is not None and b is not None
        assert relative_error(b.detach(), a.detach()) < 1e-6
