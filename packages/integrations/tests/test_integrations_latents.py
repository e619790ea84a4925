"""Models of transformers with multi-head latent attention send latents, and give the results of one rank."""

from copy import deepcopy
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from armillary.attention import ContextParallel, build_attention
from armillary.core import CommLedger
from armillary.core.testing import mesh, relative_error

transformers = pytest.importorskip("transformers")

LATENT, ROTARY, HEADS, TOKENS = 12, 4, 4, 32
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
SMALL |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": 16, "kv_lora_rank": LATENT}
SMALL |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": ROTARY, "v_head_dim": 8, "max_position_embeddings": 64}
MODELS = {"DeepseekV3": {"first_k_dense_replace": 2}, "DeepseekV2": {"first_k_dense_replace": 2}, "Youtu": {}}
MODELS |= {"MiniCPM3": {}}


def model(name: str) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**SMALL | MODELS[name], attn_implementation="eager")
    torch.manual_seed(0)
    built = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return built


def ids() -> torch.Tensor:
    return torch.randint(1, 64, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def gradients(built: nn.Module) -> dict[str, torch.Tensor]:
    grads = {name: parameter.grad for name, parameter in built.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


def errors(name: str, method: str, axes: dict[str, int], sharded: bool) -> tuple[float, dict[str, float], int]:
    """Returns the errors of the loss and of gradients against one rank, and the bytes that keys took between ranks."""
    built, axes_mesh = model(name), mesh(**axes)
    whole = deepcopy(built)
    expected_loss = whole(input_ids=ids(), labels=ids()).loss
    expected_loss.backward()
    attend = build_attention(method, axes_mesh)
    attend.send_latents = True
    cp = ContextParallel(attend, axes_mesh)
    cp.prepare(built)
    if sharded:
        flat = axes_mesh["ring"]
        for layer in built.model.layers:
            fully_shard(layer, mesh=flat)
        fully_shard(built, mesh=flat)
    with cp.shard(ids()) as batch, CommLedger() as ledger:
        loss = cp.loss(built(**batch.inputs).loss, batch)
        sent = ledger.bytes("ring", "p2p")
        loss.backward()
    if not sharded:
        cp.reduce_gradients(built)
    total = loss.detach().clone()
    dist.all_reduce(total, dist.ReduceOp.AVG)
    grads, expected = gradients(built), gradients(whole)
    return (
        relative_error(total, expected_loss.detach()),
        {key: relative_error(grads[key], expected[key]) for key in expected},
        sent,
    )


# Model, method, axes, and whether FSDP2 shards the model.
CASES = [(name, "ring", {"ring": 2}, False) for name in MODELS]
CASES += [("DeepseekV3", "ring", {"ring": 2}, True), ("Youtu", "usp", {"ring": 2, "ulysses": 2}, False)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}{' fsdp' * case[3]}")
def test_latents_travel_around_a_ring_and_results_are_those_of_one_rank(worlds, case):
    for loss, grads, sent in worlds(prod(case[2].values())).run(errors, *case):
        assert loss < 1e-5 and max(grads.values()) < 1e-4, grads
        if case[1] == "ring":  # layers, rows, tokens, one latent each, float32
            assert 0 < sent <= 2 * 2 * TOKENS // 2 * (LATENT + ROTARY) * 4


class Adapter(nn.Linear):
    """A projection that is more than a product with its weight."""


SHAPES = {"nothing": (1, 1, 8, ROTARY)}
SHAPES |= dict.fromkeys(("adapter", "hook", "another implementation"), (1, HEADS, 8, 8 + ROTARY))


def shapes_of_keys() -> dict[str, tuple[int, ...]]:
    """Returns the shape of the keys that a layer passes to attention after each change of the model."""
    shapes = {}
    for change in SHAPES:
        built, axes_mesh = model("Youtu"), mesh(ring=1)
        ContextParallel(build_attention("ring", axes_mesh), axes_mesh).prepare(built)
        layer = built.model.layers[0].self_attn
        if change == "adapter":
            layer.kv_b_proj.__class__ = Adapter
        elif change == "hook":
            layer.kv_b_proj.register_forward_hook(lambda *_: None)
        elif change == "another implementation":
            built.set_attn_implementation("sdpa")
        k, _ = layer.expand_kv(torch.randn(1, 1, 8, LATENT), torch.randn(1, 1, 8, ROTARY))
        shapes[change] = tuple(k.shape)
    return shapes


def test_keys_are_expanded_before_they_are_sent_where_attention_cannot_expand_them(worlds):
    assert worlds(1).run(shapes_of_keys) == [SHAPES]
