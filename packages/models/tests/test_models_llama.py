"""LLaMA and GPT on one device: positions, heads, windows, documents, gradients and the output head."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from dense_attention import DenseAttention
from hybrid_models import HYBRID

from armillary.attention import AttentionMask
from armillary.core import SequenceLayout
from armillary.core.testing import relative_error
from armillary.models import GPT, GPTConfig, Llama, LlamaConfig, initialize, token_loss

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


@pytest.mark.parametrize("heads, kv_heads, tied", [(4, 4, False), (6, 2, True), (4, 1, False)])
def test_logits_and_gradients_equal_the_textbooks(heads, kv_heads, tied):
    model = build(replace(SMALL, heads=heads, kv_heads=kv_heads, head_dim=8, tied_embeddings=tied))
    tokens, labels = ids(), ids().roll(-1, 1)
    names, parameters = zip(*model.named_parameters(), strict=True)
    logits, expected = model(tokens), textbook(model, tokens)
    assert relative_error(logits, expected) < 1e-12
    result = torch.autograd.grad(token_loss(logits, labels)[0], parameters)
    exact = torch.autograd.grad(F.nll_loss(expected.log_softmax(-1).mT, labels, reduction="sum"), parameters)
    for name, gradient, of_textbook in zip(names, result, exact, strict=True):
        assert gradient.any() and relative_error(gradient, of_textbook) < 1e-10, name


@pytest.mark.parametrize("layout", [SequenceLayout.striped(N, 3), SequenceLayout.zigzag(N, 5)])
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
    layout = SequenceLayout([[range(10, N), range(10)]])  # a single shard needs no positions
    order = layout.positions(0)
    assert relative_error(local(ids()[:, order], layout=layout), local(ids())[:, order]) < 1e-12


def test_each_layer_gets_the_layout_and_the_smaller_of_its_window_and_the_masks():
    layout, calls = SequenceLayout.contiguous(N, 1), []

    def record(q, k, v, *, mask, layout):
        calls.append((mask, layout))
        return q

    def masks_of_layers(mask, **window):
        calls.clear()
        build(replace(SMALL, layers=3, **window), attention=record)(ids(), mask=mask, layout=layout)
        assert all(given is layout for _, given in calls)
        return [given for given, _ in calls]

    mask = AttentionMask(documents=[0, 5, N])
    wide, narrow = (AttentionMask(window=(left, None), documents=[0, 5, N]) for left in (3, 2))
    masks = masks_of_layers(mask, window=4, window_from=1)
    assert masks == [mask, wide, wide] and masks[1] is masks[2]
    assert masks_of_layers(narrow, window=4, window_from=1) == [narrow] * 3
    assert masks_of_layers(mask) == [mask] * 3
    assert masks_of_layers(mask, window=4) == [wide] * 3
    build(attention=record)(ids())
    assert calls[3:] == [(AttentionMask(causal=True), None)] * SMALL.layers


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


def test_bfloat16_is_close_to_float64():
    logits = build().bfloat16()(ids())
    assert logits.dtype == torch.bfloat16
    assert relative_error(logits, build()(ids())) < 100 * torch.finfo(torch.bfloat16).eps


# -- documents and learned positions ----------------------------------------------------------------------------------

LEARNED = GPTConfig(vocab_size=37, dim=32, layers=2, heads=4, max_positions=64)
ROWS = [(0, 5, 6, 30), (0, 11, 28, 30)]


@pytest.mark.parametrize("config", [SMALL, LEARNED, HYBRID], ids=["llama", "gpt", "hybrid"])
def test_documents_of_a_packed_row_equal_separate_rows(config):
    """Positions restart at each document."""
    model = (GPT(config) if config is LEARNED else Llama(config)).double()
    initialize(model, 0)
    tokens = torch.randint(37, (2, 30), generator=torch.Generator().manual_seed(0))
    spans = [[range(a, b) for a, b in pairwise(ends)] for ends in ROWS]
    positions = torch.tensor([[p - span.start for span in row for p in span] for row in spans])
    logits = model(tokens, positions=positions, mask=AttentionMask(documents=ROWS))
    for row, documents in enumerate(spans):
        for span in documents:
            alone = model(tokens[row : row + 1, span.start : span.stop])[0]
            assert torch.allclose(logits[row, span.start : span.stop], alone, rtol=1e-10, atol=1e-12)


def test_a_shard_needs_only_its_learned_positions():
    model, layout, tokens = GPT(LEARNED).double(), SequenceLayout.zigzag(29, 2), torch.arange(58).view(2, 29) % 37
    hidden = model.transformer.wte(tokens) + model.transformer.wpe(torch.arange(29))
    model.transformer.h = torch.nn.ModuleList()
    shard = model.transformer(layout.take(tokens, 1), positions=layout.positions(1), layout=layout)
    assert torch.equal(shard, layout.take(model.transformer.ln_f(hidden), 1))
