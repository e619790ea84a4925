"""Multi-head latent attention in a LLaMA: latents on the wire, and weights that hide them."""

from dataclasses import replace

import pytest
import torch
from latent_models import LATENT
from torch import Tensor, nn

from armillary.attention import Local, UPipe, build_attention
from armillary.core import Axis, CommLedger
from armillary.core.testing import mesh, relative_error
from armillary.models import Checkpointing, Llama, LlamaConfig, initialize
from armillary.models.parallel.parallelize import compile_block

IDS = torch.randint(37, (2, 24), generator=torch.Generator().manual_seed(0))


def build(config: LlamaConfig = LATENT, attention: object = None, dtype: torch.dtype = torch.float64) -> Llama:
    model = Llama(config, attention).to(dtype)
    initialize(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def results(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits.backward(direction.to(logits.dtype))
    return {"logits": logits.detach(), **{name: x.grad for name, x in model.named_parameters() if x.grad is not None}}


def largest_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(relative_error(actual[name], x) for name, x in expected.items())


# -- what is sent -----------------------------------------------------------------------------------------------------


def sent_bytes(name: str, policy: str) -> dict[str, int]:
    over = mesh(**{"ring" if name == "ring" else "ulysses": 2})
    attend = build_attention(name, over)
    model = build(replace(LATENT, layers=1), attend)
    Checkpointing(policy).apply(model)
    layout = attend.layout(24, "contiguous")
    with CommLedger() as ledger:
        model(layout.take(IDS, attend.shard), positions=layout.positions(attend.shard), layout=layout).sum()
    return {kind: ledger.bytes(kind=kind) for kind in ("p2p", "all_to_all", "all_gather")}


def all_sent_bytes() -> list[dict[str, int]]:
    return [sent_bytes(name, policy) for name in ("ring", "ulysses", "upipe") for policy in ("none", "layer")]


def test_latents_are_sent_under_every_method_and_policy(worlds):
    tokens, latent, expanded = 2 * 12 * 8, 10 + 4, 8 * (12 + 6)
    ring, ring_layer, *head_methods = worlds(2).run(all_sent_bytes)[0]
    assert ring == ring_layer and ring["p2p"] == tokens * latent
    queries = tokens * 8 // 2 * (12 + 6)  # half of the heads, q and out
    for sent in head_methods:
        assert sum(sent.values()) == queries + tokens * latent < queries + tokens * expanded // 2


# -- weights that are more than a product -----------------------------------------------------------------------------


def staged(send_latents: bool | None = True) -> UPipe:
    method = UPipe(Axis.alone("ulysses"), heads_per_stage=2)
    method.send_latents = send_latents
    return method


def with_adapter(model: Llama) -> None:
    for block in model.model.layers:
        block.self_attn.kv_b_proj = nn.Sequential(block.self_attn.kv_b_proj)


def with_hook(model: Llama) -> None:
    for block in model.model.layers:
        block.self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: 2 * out)


@pytest.mark.parametrize("change", [with_adapter, with_hook])
@pytest.mark.parametrize("policy", [Checkpointing(), Checkpointing("attention_output", chunk=5)], ids=["none", "kept"])
def test_adapters_and_hooks_of_the_expansion_are_called(change, policy):
    actual = []
    for attention in (Local(), staged()):
        model = build(attention=attention)
        change(model)
        policy.apply(model)
        actual.append(results(model, model(IDS)))
    assert largest_error(*actual) < 1e-12
    unchanged = build()
    differs = relative_error(actual[0]["logits"], unchanged(IDS).detach()) > 1e-3
    assert differs == (change is with_hook)


@pytest.mark.parametrize("frozen", ["kv_b_proj", "kv_a_proj_with_mqa", "q_a_proj"])
def test_frozen_weights_get_no_gradient(frozen):
    actual = []
    for attention, policy in ((Local(), Checkpointing()), (staged(), Checkpointing("layer", chunk=5))):
        model = build(attention=attention)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        policy.apply(model)
        actual.append(results(model, model(IDS)))
    assert not any(frozen in name for name in actual[0]) and largest_error(actual[1], actual[0]) < 1e-12


@pytest.mark.parametrize("policy", [Checkpointing(), Checkpointing("layer", chunk=5)], ids=["none", "layer"])
def test_autocast_errs_as_with_expanded_keys(policy):
    exact = build()
    expected = results(exact, exact(IDS))
    errors = []
    for send_latents in (False, True):
        model = build(attention=staged(send_latents), dtype=torch.float32)
        policy.apply(model)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(IDS)
        actual = results(model, logits)
        errors.append({name: relative_error(actual[name].double(), x) for name, x in expected.items()})
    assert all(errors[1][name] < 1.5 * errors[0][name] for name in expected), errors


def test_layers_share_one_compiled_graph():
    torch._dynamo.reset()
    model, compiled = build(), build()
    for block in compiled.model.layers:
        compile_block(block, "aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    expected, actual = (results(each, each(IDS)) for each in (model, compiled))
    assert largest_error(actual, expected) < 1e-12
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
