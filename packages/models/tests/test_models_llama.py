"""LLaMA on one device: positions, heads, gradients and the output head."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from dense_attention import DenseAttention

from armillary.attention import AttentionMask
from armillary.core import SequenceLayout
from armillary.core.testing import relative_error
from armillary.models import Llama, LlamaConfig, initialize, token_loss

N = 24
SMALL = LlamaConfig(vocab_size=50, dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48, rope_theta=10_000.0)


def build(config=SMALL, positions=None, attention=None) -> Llama:
    """A float64 model with weights large enough that positions and heads matter."""
    dense = DenseAttention(torch.arange(N) if positions is None else positions)
    model = Llama(config, attention or dense).double()
    initialize(model, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    return model


def ids(rows: int = 2) -> torch.Tensor:
    return torch.randint(SMALL.vocab_size, (rows, N), generator=torch.Generator().manual_seed(0))


def textbook(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    """Reference LLaMA: complex RoPE, a loop over heads, explicit norms and gates."""
    weights, config = dict(model.named_parameters()), model.config

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name]

    def turn(x):
        half = config.head_dim // 2
        angles = torch.arange(N)[:, None] * config.rope_theta ** (-torch.arange(half).double() / half)
        pairs = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous())
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], -1)

    def head(x, at, kind, h):
        return x @ weights[f"{at}.self_attn.{kind}_proj.weight"][h * config.head_dim : (h + 1) * config.head_dim].T

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        y, outs = norm(x, f"{at}.input_layernorm.weight"), []
        for h in range(config.heads):
            g = h // (config.heads // config.kv_heads)
            scores = turn(head(y, at, "q", h)) @ turn(head(y, at, "k", g)).mT / config.head_dim**0.5
            scores = scores + torch.full((N, N), -torch.inf, dtype=torch.float64).triu(1)
            outs.append(scores.softmax(-1) @ head(y, at, "v", g))
        x = x + torch.cat(outs, -1) @ weights[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm.weight")
        gate, up = (y @ weights[f"{at}.mlp.{kind}_proj.weight"].T for kind in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{at}.mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ model.head_weight.T


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_logits_match_the_textbook(heads, kv_heads):
    model = build(replace(SMALL, heads=heads, kv_heads=kv_heads, head_dim=8))
    assert relative_error(model(ids()), textbook(model, ids())) < 1e-12


def test_each_query_head_reads_the_key_head_of_its_group():
    """Zeroing the values of one key/value head zeroes exactly the query heads of its group."""
    masks = []

    def spy(q, k, v, *, mask, layout):
        masks.append(DenseAttention(torch.arange(N))(q, k, v, mask=mask, layout=layout))
        return masks[-1]

    model = build(replace(SMALL, heads=6, kv_heads=3, head_dim=8), attention=spy)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[8:16] = 0
    model(ids())
    silent = [h for h in range(6) if not masks[0][:, :, h].any()]
    assert silent == [2, 3]


@pytest.mark.parametrize(
    "layout", [SequenceLayout.zigzag(N, 2), SequenceLayout.striped(N, 3), SequenceLayout.zigzag(N, 5)]
)
def test_logits_follow_the_order_of_the_tokens(layout):
    order = torch.cat([layout.positions(shard) for shard in range(layout.shards)])
    tokens = ids()
    shuffled = build(positions=order)(tokens[:, order], positions=order, layout=layout)
    assert relative_error(shuffled, build()(tokens)[:, order]) < 1e-12


def test_attention_is_local_by_default():
    model, local = build(), Llama(SMALL).double()
    local.load_state_dict(model.state_dict())
    mask = AttentionMask(causal=True, window=(5, None), documents=[0, 7, 13, N])
    assert relative_error(local(ids()), model(ids())) < 1e-12
    assert relative_error(local(ids(), mask=mask), model(ids(), mask=mask)) < 1e-12


def test_a_single_shard_needs_no_positions():
    layout = SequenceLayout([[range(10, N), range(10)]])
    model = Llama(SMALL).double()
    model.load_state_dict(build().state_dict())
    order = layout.positions(0)
    assert relative_error(model(ids()[:, order], layout=layout), model(ids())[:, order]) < 1e-12


def test_positions_start_at_zero_and_only_distances_matter():
    model, tokens = build(), ids()
    logits = model(tokens)
    assert torch.equal(model(tokens, positions=torch.arange(N)), logits)
    assert relative_error(model(tokens, positions=torch.arange(N) + 1000), logits) < 1e-10
    assert relative_error(model(tokens, positions=2 * torch.arange(N)), logits) > 1e-2


def test_a_token_does_not_change_earlier_logits():
    model, tokens = build(), ids()
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % SMALL.vocab_size
    moved = (model(tokens) - model(changed)).abs().amax(dim=(0, 2)) > 1e-9
    assert moved.tolist() == [False] * 10 + [True] * (N - 10)


def test_every_layer_receives_mask_and_layout():
    calls = []
    dense = DenseAttention(torch.arange(N))

    def spy(q, k, v, *, mask, layout):
        calls.append((mask, layout))
        return dense(q, k, v, mask=mask, layout=layout)

    model = build(attention=spy)
    mask, layout = AttentionMask(causal=False), SequenceLayout.contiguous(N, 1)
    model(ids(), mask=mask, layout=layout)
    model(ids())
    assert calls == [(mask, layout)] * SMALL.layers + [(AttentionMask(causal=True), None)] * SMALL.layers


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_gets_the_gradient_of_the_textbook(tied):
    model, tokens = build(replace(SMALL, tied_embeddings=tied)), ids()
    labels = tokens.roll(-1, 1)
    names, parameters = zip(*model.named_parameters(), strict=True)
    result = torch.autograd.grad(token_loss(model(tokens), labels)[0], parameters)
    expected = torch.autograd.grad(
        F.nll_loss(textbook(model, tokens).log_softmax(-1).mT, labels, reduction="sum"), parameters
    )
    errors = {name: relative_error(g, e) for name, g, e in zip(names, result, expected, strict=True)}
    assert max(errors.values()) < 1e-10, errors
    assert all(gradient.any() for gradient in result)


def test_a_tied_head_stays_tied_after_a_move():
    config = replace(SMALL, tied_embeddings=True)
    dense = DenseAttention(torch.arange(N))
    with torch.device("meta"):
        model = Llama(config, dense)
    model.to_empty(device="cpu")
    initialize(model, seed=0)
    assert model.head_weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in model.state_dict()
    assert torch.equal(model(ids()), model.model(ids()) @ model.model.embed_tokens.weight.T)


def test_a_head_replaces_the_logits():
    model, tokens = build(), ids()
    assert torch.equal(model(tokens, head=lambda hidden, weight: hidden), model.model(tokens))
    loss = model(tokens, head=lambda hidden, weight: token_loss(hidden @ weight.T, tokens)[0])
    assert loss.item() == pytest.approx(token_loss(model(tokens), tokens)[0].item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_close_to_float64(dtype):
    exact = build()
    model = build().to(dtype)
    assert model(ids()).dtype == dtype
    assert relative_error(model(ids()), exact(ids())) < 100 * torch.finfo(dtype).eps
