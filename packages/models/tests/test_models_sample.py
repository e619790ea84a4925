"""Sampling: the cache compared with transformers and with full forwards, on one rank and several."""

from dataclasses import replace

import pytest
import torch
from hybrid_models import HYBRID
from latent_models import LATENT
from torch import Tensor, nn

from armillary.attention import AttentionMask, Local, UPipe, build_attention
from armillary.core.testing import mesh
from armillary.models import (
    GPT,
    Checkpointing,
    GPTConfig,
    Llama,
    LlamaConfig,
    Sampling,
    generate,
    initialize,
    parallelize,
    stream,
)

LLAMA = LlamaConfig(vocab_size=61, dim=36, layers=3, heads=6, kv_heads=2, head_dim=8, hidden_dim=48, rope_theta=1e4)
GPT2 = GPTConfig(vocab_size=61, dim=24, layers=2, heads=4, max_positions=40)
SPREAD = replace(HYBRID, vocab_size=61, mixers=("delta_rule", "attention", "mamba2"))
MODELS = {"llama": LLAMA, "gpt": GPT2, "hybrid": SPREAD, "latent": replace(LATENT, vocab_size=61)}


def build(kind: str = "llama", dtype=torch.float64, attention=None, **changes) -> Llama | GPT:
    """Weights so large that every token matters and greedy text does not repeat a token at once."""
    config = replace(MODELS[kind], **changes)
    model = (GPT(config, attention) if kind == "gpt" else Llama(config, attention)).double()
    initialize(model, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim == 2 else 1)
    return model.to(dtype)


def prompt(rows: int = 2, tokens: int = 9) -> Tensor:
    return torch.randint(60, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def greedy(model: nn.Module, ids: Tensor, new: int, mask: AttentionMask | None = None) -> Tensor:
    """Greedy decoding with a full forward per token."""
    for _ in range(new):
        ids = torch.cat([ids, model(ids, mask=mask)[:, -1:].argmax(-1)], 1)
    return ids[:, -new:]


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_greedy_text_matches_transformers(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    model, ids = build(kind, torch.float32), prompt()
    model.save_pretrained(tmp_path)
    special = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 25}
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = twin.generate(ids, **options, **special)[:, ids.shape[1] :]
    result = generate(model, ids, new_tokens=25)
    assert torch.equal(result, expected)
    assert len(set(result[0].tolist())) > 5


@pytest.mark.parametrize(
    ("kind", "window", "tokens", "changes"),
    [
        ("llama", (4, None), 9, {"tied_embeddings": True}),
        ("llama", (0, 0), 2, {}),
        ("llama", None, 9, {"window": 4, "window_from": 1}),
        ("gpt", None, 9, {}),
        ("gpt", (0, 0), 1, {}),
        ("hybrid", None, 1, {}),
        ("hybrid", None, 9, {}),
        ("latent", (4, None), 9, {}),
    ],
    ids=str,
)
def test_greedy_text_equals_full_forwards(kind, window, tokens, changes):
    """GPT's text ends at its last position."""
    model, mask, ids = build(kind, **changes), AttentionMask(window=window), prompt(3, tokens)
    for new in (1, 31 if kind == "gpt" and tokens == 9 else 15):
        expected = greedy(model, ids, new, mask)
        assert torch.equal(generate(model, ids, new_tokens=new, mask=mask), expected)
    assert len(set(expected[0].tolist())) > 3


def test_half_precision_continues_as_its_full_forward():
    model = build(dtype=torch.bfloat16)
    text = torch.cat([prompt(), generate(model, prompt(), new_tokens=10)], 1)
    logits = model(text)[:, 8:-1]
    chosen = logits.gather(-1, text[:, 9:, None])
    assert ((logits.amax(-1, keepdim=True) - chosen) / logits.std()).max() < 0.1  # likeliest, up to rounding


@pytest.mark.parametrize(
    ("policy", "attention"), [("layer", Local()), ("attention_output", UPipe.for_method(Local(), 2))]
)
def test_checkpoint_policies_are_suspended_and_restored(policy, attention):
    model = build(attention=attention)
    expected = greedy(model, prompt(), 6)
    Checkpointing(policy).apply(model)
    before = [block.run for block in model.model.layers]
    assert torch.equal(generate(model, prompt(), new_tokens=6), expected)
    assert [block.run for block in model.model.layers] == before


# -- random draws, stopping and streaming -------------------------------------------------------------------------


def test_draws_depend_only_on_the_seed():
    model, options = build(), {"new_tokens": 20, "temperature": 5.0, "top_k": 30, "top_p": 0.95}
    ids, state = prompt(1).repeat_interleave(4, 0), torch.get_rng_state()
    first = generate(model, ids, seed=1, **options)
    assert torch.equal(torch.get_rng_state(), state)  # draws leave other generators unchanged
    torch.manual_seed(99)
    assert torch.equal(generate(model, ids, seed=1, **options), first)
    assert not torch.equal(generate(model, ids, seed=2, **options), first)
    assert len({tuple(row) for row in first.tolist()}) == 4  # completions of a prompt are rows, and differ
    assert torch.equal(generate(model, prompt(), seed=1, new_tokens=8, temperature=1e-6), greedy(model, prompt(), 8))


def test_a_stream_ends_with_its_last_row_and_generate_pads():
    model = build()
    full = generate(model, prompt(), new_tokens=20).tolist()
    stop = (full[0][3], full[1][6])
    ends = [min(row.index(s) for s in stop if s in row) for row in full]
    columns = list(stream(model, prompt(), new_tokens=20, stop=stop))
    assert len(columns) == max(ends) + 1
    result = generate(model, prompt(), new_tokens=20, stop=stop)
    assert torch.equal(result[:, : len(columns)], torch.stack(columns, 1))
    for row, free, end in zip(result.tolist(), full, ends, strict=True):
        assert row == free[: end + 1] + [free[end]] * (19 - end)


def test_the_model_is_usable_between_tokens_of_a_stream():
    model = build()
    expected, other = greedy(model, prompt(), 6), greedy(model, prompt(1, 5), 6)
    pairs = zip(stream(model, prompt(), new_tokens=6), stream(model, prompt(1, 5), new_tokens=6), strict=True)
    result = []
    for pair in pairs:
        model(prompt()).sum().backward()
        result.append(pair)
    first, second = zip(*result, strict=True)
    assert torch.equal(torch.stack(first, 1), expected)
    assert torch.equal(torch.stack(second, 1), other)


@pytest.mark.parametrize("after", [None, 0, 3])
def test_the_model_is_restored(after):
    """Also after an error in the prompt or in a token."""
    model, calls = build(), []
    model.model.layers[0].eval()

    def snapshot():
        return [(b.self_attn.attention, b.run) for b in model.model.layers], [m.training for m in model.modules()]

    def hook(module, _, out):
        calls.append((module.training, out.requires_grad))
        if after is not None and len(calls) > after:
            raise RuntimeError("broken")

    before = snapshot()
    handle = model.model.layers[2].mlp.register_forward_hook(hook)
    if after is None:
        generate(model, prompt(), new_tokens=5)
    else:
        with pytest.raises(RuntimeError, match="broken"):
            generate(model, prompt(), new_tokens=5)
    handle.remove()
    assert set(calls) == {(False, False)}  # in eval mode, without gradients
    assert snapshot() == before and torch.is_grad_enabled()
    assert torch.equal(generate(model, prompt(), new_tokens=5), greedy(model, prompt(), 5))


# -- several ranks ------------------------------------------------------------------------------------------------


DRAWN = {"new_tokens": 8, "temperature": 3.0, "top_p": 0.9}
SHARDED = {"gpt": {"shard": 2, "tp": 2}, "hybrid": {"ring": 2, "tp": 2}, "latent": {"ring": 2, "tp": 2}}


def sampled_on_ranks() -> list[Tensor]:
    """Greedy text, text drawn with a seed that only the first rank has, and text of each sharded model."""
    method = build_attention("usp", mesh(ring=2, ulysses=2))
    model = build(attention=method)
    texts = [generate(model, prompt(), new_tokens=8), generate(model, prompt(), seed=4 + method.shard, **DRAWN)]
    for kind, axes in SHARDED.items():
        over, model = mesh(**axes), build(kind)
        attention = build_attention("ring", over) if "ring" in axes else None
        parallelize(model, over, attention=attention, precision=torch.float64)
        texts.append(generate(model, prompt(tokens=10), new_tokens=6))
    return texts


def test_all_ranks_of_any_mesh_sample_the_text_of_one_rank(worlds):
    """With ranks that share a sequence, tensor parallelism and FSDP; the vocabulary is no multiple of the ranks."""
    expected = [generate(build(), prompt(), new_tokens=8), generate(build(), prompt(), seed=4, **DRAWN)]
    expected += [generate(build(kind), prompt(tokens=10), new_tokens=6) for kind in SHARDED]
    for texts in worlds(4).run(sampled_on_ranks):
        assert all(map(torch.equal, texts, expected))


# -- the distribution of draws ------------------------------------------------------------------------------------

LOGITS = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]]).log()


def probabilities(logits=LOGITS, **options) -> Tensor:
    return Sampling(**{"temperature": 1.0} | options).probabilities(logits)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [0.4, 0.1, 0.3, 0.2]),
        ({"temperature": 0.5}, [16 / 30, 1 / 30, 9 / 30, 4 / 30]),
        ({"top_k": 2}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 9}, [0.4, 0.1, 0.3, 0.2]),
        ({"top_p": 0.39}, [1, 0, 0, 0]),
        ({"top_p": 0.5}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.8}, [4 / 9, 0, 3 / 9, 2 / 9]),
        ({"top_p": 1.0}, [0.4, 0.1, 0.3, 0.2]),
        ({"top_k": 2, "top_p": 0.55}, [1, 0, 0, 0]),  # of the probabilities of the top k
        ({"top_k": 2, "top_p": 0.58}, [4 / 7, 0, 3 / 7, 0]),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest_tokens(options, expected):
    assert torch.allclose(probabilities(**options)[0], torch.tensor(expected, dtype=torch.float32), atol=1e-6)


def test_frequencies_of_draws_match_probabilities():
    count = 40_000
    draws = Sampling(1.0, top_k=3).choose(LOGITS[:1].expand(count, -1), torch.Generator().manual_seed(0))
    actual = draws.bincount(minlength=4) / count
    expected = torch.tensor([4 / 9, 0, 3 / 9, 2 / 9])
    deviation = (expected * (1 - expected) / count).sqrt()
    assert actual[1] == 0
    assert ((actual - expected).abs() <= 4 * deviation).all()


def test_low_precision_logits_are_filtered_in_float32():
    actual = probabilities(LOGITS.half(), top_p=0.8)
    assert actual.dtype == torch.float32
    assert torch.allclose(actual.sum(-1), torch.ones(2))
    assert Sampling(1e-30).choose(LOGITS[:1].half(), torch.Generator()).tolist() == [0]
