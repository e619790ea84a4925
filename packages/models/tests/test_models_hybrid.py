"""Hybrids of attention, Gated DeltaNet and Mamba-2, compared with their recurrences and with one rank."""

import itertools
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.nn.functional as F
from test_models_parallel import LAYER, TILED, Case, compare_all, on_one_rank
from torch import Tensor

from armillary.attention import AttentionMask, build_attention
from armillary.core.testing import mesh, relative_error
from armillary.models import Checkpointing, Llama, LlamaConfig, StateConfig, generate, initialize, parallelize
from armillary.models.layers.state_mixers import GatedDeltaNet, Mamba2, StateMixer

STATES = StateConfig(heads=4, key_heads=2, key_dim=6, value_dim=5)
HYBRID = LlamaConfig(
    vocab_size=37,
    dim=32,
    layers=3,
    heads=8,
    kv_heads=4,
    hidden_dim=48,
    head_dim=8,
    mixers=("delta_rule", "mamba2", "attention"),
    states=STATES,
)


# -- oracles ---------------------------------------------------------------------------------------------------------


def mixer(kind: type[StateMixer], dim: int = 12) -> StateMixer:
    """A mixer in float64 with random parameters."""
    torch.manual_seed(0)
    module = kind(dim, STATES, 1e-5, None).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.7)
    return module


def recurrence(module: StateMixer, x: Tensor) -> Tensor:
    """The mixer's output [N, H, Dv] for one sequence [N, E], computed token by token."""
    inputs = []
    for name in "qkv":
        y, conv = getattr(module, f"{name}_proj")(x), getattr(module, f"{name}_conv1d")
        padded = torch.cat([y.new_zeros(STATES.conv_width - 1, y.shape[1]), y])
        y = sum(conv.weight[:, 0, w] * padded[w : w + len(x)] for w in range(STATES.conv_width))
        inputs.append(F.silu(y if conv.bias is None else y + conv.bias))
    q, k = (y.view(len(x), STATES.key_heads, -1).repeat_interleave(2, 1) for y in inputs[:2])
    v, z = (y.view(len(x), STATES.heads, -1) for y in (inputs[2], module.z_proj(x)))
    dt = F.softplus(module.a_proj(x) + module.dt_bias)
    decay = torch.exp(-dt * torch.exp(module.A_log))
    state, outs = x.new_zeros(STATES.heads, STATES.key_dim, STATES.value_dim), []
    if isinstance(module, GatedDeltaNet):
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        beta = torch.sigmoid(module.b_proj(x))
        for t in range(len(x)):
            state = decay[t, :, None, None] * state
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + beta[t, :, None, None] * torch.einsum("hk,hv->hkv", k[t], error)
            outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * STATES.key_dim**-0.5)
        out = torch.stack(outs)
        return out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.norm.weight * F.silu(z)
    for t in range(len(x)):
        state = decay[t, :, None, None] * state + torch.einsum("h,hk,hv->hkv", dt[t], k[t], v[t])
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) + module.D[:, None] * v[t])
    groups = (torch.stack(outs) * F.silu(z)).view(len(x), STATES.key_heads, -1)
    normed = groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return (normed.view(len(x), -1) * module.norm_weight).view_as(v)


@pytest.mark.parametrize("kind", [GatedDeltaNet, Mamba2])
def test_mixers_equal_their_recurrences_with_documents(kind):
    module, x = mixer(kind), torch.randn(2, 23, 12, dtype=torch.float64)
    ends = [[0, 9, 23], [0, 1, 20, 23]]
    actual = module(x, mask=AttentionMask.rows([AttentionMask(documents=row) for row in ends]), layout=None)
    exact = torch.stack(
        [
            torch.cat([recurrence(module, x[row, a:b]) for a, b in itertools.pairwise(bounds)])
            for row, bounds in enumerate(ends)
        ]
    )
    direction = torch.randn_like(exact)
    for a, b in zip(
        (
            actual,
            *torch.autograd.grad((actual * direction).sum(), [p for n, p in module.named_parameters() if n[0] != "o"]),
        ),
        (
            exact,
            *torch.autograd.grad((exact * direction).sum(), [p for n, p in module.named_parameters() if n[0] != "o"]),
        ),
        strict=True,
    ):
        assert relative_error(a, b) < 1e-10


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
    reference, module = modeling.Qwen3NextGatedDeltaNet(config, 0), mixer(GatedDeltaNet).float()
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
    x = torch.randn(2, 70, 12)
    actual = module.o_proj(module(x, mask=AttentionMask(causal=True), layout=None).flatten(-2))
    assert relative_error(actual, reference(x)) < 1e-5


def test_mamba2_equals_transformers():
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = modeling.Mamba2Config(
        hidden_size=10, num_heads=4, head_dim=5, expand=2, state_size=6, n_groups=2, num_hidden_layers=1, use_bias=False
    )
    reference, module = modeling.Mamba2Mixer(config, 0), mixer(Mamba2, 10).float()
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
    x = torch.randn(2, 70, 10)
    actual = module.o_proj(module(x, mask=AttentionMask(causal=True), layout=None).flatten(-2))
    assert relative_error(actual, reference(x)) < 1e-5


# -- one rank and many -----------------------------------------------------------------------------------------------

KEEP = Checkpointing("attention_output", chunk=3, inputs=2)
ONE_GROUP = replace(HYBRID, mixers=("attention", "mamba2", "delta_rule"), tied_embeddings=True)
OF_STATES = replace(HYBRID, layers=2, mixers=("delta_rule", "mamba2"))
GROUPS = {
    "4 ranks": [
        Case({"ring": 4}, "ring", HYBRID, packed=True),
        Case({"ring": 2, "ulysses": 2}, "usp", HYBRID, KEEP, packed=True, tokens=43),
        Case({"tp": 2, "ring": 2}, "ring", HYBRID, LAYER, packed=True, tokens=43),
    ],
    "4 ranks, sharded": [Case({"shard": 2, "ulysses": 2}, "ulysses", ONE_GROUP, LAYER, tokens=43)],
    "relaid": [
        Case({"ring": 4}, "ring", HYBRID, packed=True, tokens=43, contiguous_states=True),
        Case({"ring": 2, "ulysses": 2}, "usp", HYBRID, KEEP, packed=True, contiguous_states=True),
        Case({"shard": 2, "ring": 2}, "ring", ONE_GROUP, LAYER, tokens=43, contiguous_states=True),
    ],
    "2 ranks": [
        Case({"ring": 2}, "ring", HYBRID, TILED, layout="contiguous", packed=True),
        Case({"tp": 2}, "local", ONE_GROUP, KEEP, sharded=False, tokens=13),
    ],
    "compiled blocks": [Case({"ring": 2}, "ring", OF_STATES, compiler="aot_eager", packed=True)],
    "compiled blocks, relaid": [
        Case({"ring": 2}, "ring", HYBRID, compiler="aot_eager", packed=True, contiguous_states=True)
    ],
    "compiled in part": [Case({"ring": 2}, "ring", HYBRID, LAYER, compiler="aot_eager")],
}
LONG = ("4 ranks, sharded", "compiled blocks, relaid", "compiled in part")
"""Other groups have sharded weights, compiled blocks and eager relaid ones; other models are compiled in part."""


def compare_and_count_graphs(
    cases: list[Case], expected: list[list[dict[str, Tensor]]]
) -> tuple[list[str], int, dict[str, int]]:
    """Returns (differences from one rank, number of graphs, graph breaks)."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    faults = compare_all(cases, expected)
    return faults, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.parametrize("group", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in GROUPS])
def test_loss_gradients_and_a_step_equal_one_rank(worlds, group):
    """Compiled blocks are one graph each. Those of attention are compiled in other models."""
    cases = GROUPS[group]
    expected = [[on_one_rank(case, dtype) for dtype in (torch.float64, torch.float32)] for case in cases]
    ranks = worlds(prod(cases[0].axes.values()))
    for faults, graphs, breaks in ranks.run(compare_and_count_graphs, cases, expected, timeout=300):
        assert not faults
        if group.startswith("compiled blocks"):
            assert graphs >= cases[0].config.layers  # one for each mixer
            assert not breaks


@pytest.mark.parametrize("policy", [LAYER, KEEP, TILED], ids=lambda policy: policy.policy)
def test_checkpoint_policies_change_no_gradient(policy):
    grads = []
    for options in (Checkpointing(), policy):
        model = Llama(HYBRID).double()
        initialize(model, 0)
        options.apply(model)
        model(torch.arange(37)[None]).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert max(relative_error(a, b) for a, b in zip(*grads, strict=True)) < 1e-10


# -- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_count(tied):
    config = replace(HYBRID, layers=8, tied_embeddings=tied)
    assert sum(p.numel() for p in Llama(config).parameters()) == config.parameters()
    assert config.mixer_counts() == {"delta_rule": 3, "mamba2": 3, "attention": 2}
    assert [config.mixer_of(i) for i in range(4)] == ["delta_rule", "mamba2", "attention", "delta_rule"]


def test_flops_count_states_and_attention_layers_only():
    attention = replace(HYBRID, mixers=("attention",), states=None)
    assert HYBRID.flops_per_token(64) - 6 * (HYBRID.parameters() - 37 * 32) < attention.flops_per_token(64) - 6 * (
        attention.parameters() - 37 * 32
    )
    rates = [HYBRID.flops_per_token(n) for n in (1000, 2000, 3000)]
    assert rates[2] - rates[1] == pytest.approx(rates[1] - rates[0])
    assert rates[1] - rates[0] == pytest.approx(12 * 500 * 64)  # one attention layer


# -- generation ------------------------------------------------------------------------------------------------------

SPREAD = replace(HYBRID, mixers=("delta_rule", "attention", "mamba2"))


def generator_model(attention=None) -> Llama:
    """A model with weights so large that every token matters."""
    model = Llama(SPREAD, attention).double()
    initialize(model, 5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(10 if name.endswith("proj.weight") else 1)
    return model


def prompt(tokens: int) -> Tensor:
    return torch.randint(37, (2, tokens), generator=torch.Generator().manual_seed(tokens))


def greedy(ids: Tensor, new: int) -> Tensor:
    model = generator_model()
    for _ in range(new):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids[:, -new:]


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_greedy_text_equals_full_forwards(tokens):
    expected = greedy(prompt(tokens), 10)
    assert torch.equal(generate(generator_model(), prompt(tokens), new_tokens=10), expected)
    assert len({*expected[0].tolist()}) > 3


def generated() -> Tensor:
    over = mesh(ring=2, tp=2)
    model = generator_model()
    parallelize(model, over, attention=build_attention("ring", over), precision=torch.float64)
    return generate(model, prompt(11), new_tokens=10)


def test_all_ranks_sample_the_text_of_one_rank(worlds):
    expected = greedy(prompt(11), 10)
    for result in worlds(4).run(generated):
        assert torch.equal(result, expected)


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_saved_folder_has_the_mixers_and_every_weight(tmp_path):
    model = Llama(replace(HYBRID, layers=5, qk_norm=True, window=9, window_from=3))
    initialize(model, 2)
    model.save_pretrained(tmp_path)
    loaded = Llama.from_pretrained(tmp_path)
    assert loaded.config == model.config
    ids = prompt(8)
    assert torch.equal(loaded(ids), model(ids))
