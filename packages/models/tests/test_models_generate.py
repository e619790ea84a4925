"""Generation on one device, compared with transformers and with full forwards."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from test_models_gpt import transformers_weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from armillary.attention import AttentionMask, Local, UPipe
from armillary.core import SequenceLayout
from armillary.core.testing import relative_error
from armillary.models import GPT, Checkpointing, Decoding, GPTConfig, Llama, LlamaConfig, generate, initialize, stream

LLAMA = LlamaConfig(vocab_size=60, dim=36, layers=3, heads=6, kv_heads=2, head_dim=8, hidden_dim=48, rope_theta=1e4)
GPT2 = GPTConfig(vocab_size=60, dim=24, layers=2, heads=4, max_positions=40)
MODELS = {"llama": LLAMA, "gpt": GPT2}


def build(kind: str = "llama", dtype: torch.dtype = torch.float64, attention=None) -> Llama | GPT:
    """Weights so large that every token matters and greedy text does not repeat a token at once."""
    model = (Llama(LLAMA, attention) if kind == "llama" else GPT(GPT2, attention)).double()
    initialize(model, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    return model.to(dtype)


def prompt(rows: int = 2, tokens: int = 9) -> torch.Tensor:
    return torch.randint(60, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def greedy(model: nn.Module, ids: torch.Tensor, new: int, mask: AttentionMask | None = None) -> torch.Tensor:
    """Greedy decoding with a full forward per token."""
    for _ in range(new):
        ids = torch.cat([ids, model(ids, mask=mask)[:, -1:].argmax(-1)], 1)
    return ids[:, -new:]


def transformers_twin(model: Llama | GPT) -> nn.Module:
    """transformers' model with the same weights."""
    transformers = pytest.importorskip("transformers")
    if isinstance(model, GPT):
        config = transformers.GPT2Config(vocab_size=60, n_embd=24, n_layer=2, n_head=4, n_positions=40)
        twin = transformers.GPT2LMHeadModel(config)
        weights = transformers_weights(model)
    else:
        config = transformers.LlamaConfig(
            vocab_size=60,
            hidden_size=36,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=48,
            rope_theta=1e4,
            rms_norm_eps=LLAMA.norm_eps,
        )
        twin = transformers.LlamaForCausalLM(config)
        weights = model.state_dict()
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    return twin.to(next(model.parameters()).dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", MODELS)
def test_greedy_text_matches_transformers(kind, dtype):
    model = build(kind, dtype)
    twin = transformers_twin(model)
    ids = prompt()
    expected = twin.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=25,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    result = generate(model, ids, new_tokens=25)
    assert torch.equal(result, expected[:, ids.shape[1] :])
    assert len(set(result[0].tolist())) > 5


@pytest.mark.parametrize("window", [None, (4, None), (0, 0)])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_of_each_step_equal_the_full_forward(kind, window):
    model, mask, ids = build(kind), AttentionMask(window=window), prompt(3, 30)
    decoding = Decoding(model, max_new_tokens=19, mask=mask)
    logits = [decoding.prompt(ids[:, :11]), *(decoding.step(token) for token in ids[:, 11:].unbind(1))]
    assert relative_error(torch.stack(logits, 1), model(ids, mask=mask)[:, 10:]) < 1e-12


def test_generation_respects_a_window():
    model, mask = build(), AttentionMask(window=(3, None))
    assert torch.equal(generate(model, prompt(), new_tokens=20, mask=mask), greedy(model, prompt(), 20, mask))


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("new", [1, 7])
def test_the_shortest_prompts_and_texts(tokens, new):
    model = build()
    assert torch.equal(generate(model, prompt(2, tokens), new_tokens=new), greedy(model, prompt(2, tokens), new))


def test_a_prompt_may_be_in_any_order():
    layout = SequenceLayout([[range(5, 9), range(5)]])
    model = build()
    assert torch.equal(generate(model, prompt(), new_tokens=9, layout=layout), greedy(model, prompt(), 9))


@pytest.mark.parametrize("attention", [Local(), UPipe.for_method(Local(), 2)], ids=["local", "upipe"])
@pytest.mark.parametrize("policy", ["none", "layer", "attention_output"])
def test_checkpoint_policies_are_suspended_and_restored(policy, attention):
    model = build(attention=attention)
    expected = greedy(model, prompt(), 6)
    Checkpointing(policy).apply(model)
    before = [block.run for block in model.model.layers]
    assert torch.equal(generate(model, prompt(), new_tokens=6), expected)
    assert [block.run for block in model.model.layers] == before


def test_half_precision_matches_its_full_forward():
    model = build(dtype=torch.bfloat16)
    ids = prompt(2, 20)
    decoding = Decoding(model, max_new_tokens=10)
    logits = [decoding.prompt(ids[:, :10]), *(decoding.step(token) for token in ids[:, 10:].unbind(1))]
    assert logits[-1].dtype == torch.bfloat16
    assert relative_error(torch.stack(logits, 1), build()(ids)[:, 9:]) < 0.1


# -- several completions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"mask": AttentionMask(window=(4, None))}], ids=["causal", "window"])
@pytest.mark.parametrize("kind", MODELS)
def test_completions_equal_those_of_separate_runs(kind, options):
    model, options = build(kind), {"new_tokens": 12, "temperature": 4.0, "top_p": 0.95} | options
    completions = generate(model, prompt(), completions=3, seed=7, **options)
    assert completions.shape == (6, 12)
    separate = [generate(model, prompt(), seed=7 + j, **options) for j in range(3)]
    assert torch.equal(completions, torch.stack(separate, 1).flatten(0, 1))
    assert len({tuple(row) for row in completions.tolist()}) == 6


def test_completions_stop_one_by_one():
    model, options = build(), {"new_tokens": 12, "temperature": 4.0}
    full = generate(model, prompt(1), completions=4, **options)
    stop = [int(full[0, 2]), int(full[2, 5])]
    completions = generate(model, prompt(1), completions=4, stop=stop, **options)
    separate = [generate(model, prompt(1), seed=j, stop=stop, **options) for j in range(4)]
    assert torch.equal(completions, torch.cat(separate))


def test_the_prompt_is_cached_once():
    decoding = Decoding(build(), max_new_tokens=6, completions=5)
    decoding.prompt(prompt(2, 30))
    decoding.step(torch.zeros(10, dtype=torch.long))
    cache_bytes = sum(x.nbytes for layer in decoding.layers for x in (*layer.prompt, *layer.new))
    assert cache_bytes == LLAMA.layers * 2 * (2 * 30 + 2 * 5 * 6) * 2 * 8 * 8  # 2 (B T + B n R) K D e a layer
    with pytest.raises(ValueError, match="completions=0"):
        generate(build(), prompt(), new_tokens=2, completions=0)


# -- sampling -----------------------------------------------------------------------------------------------------


def test_draws_depend_only_on_the_seed():
    model, options = build(), {"new_tokens": 20, "temperature": 5.0, "top_k": 30, "top_p": 0.95}
    first = generate(model, prompt(), seed=1, **options)
    torch.manual_seed(99)
    assert torch.equal(generate(model, prompt(), seed=1, **options), first)
    assert not torch.equal(generate(model, prompt(), seed=2, **options), first)
    assert torch.equal(generate(model, prompt(), seed=1, new_tokens=8, temperature=1e-6), greedy(model, prompt(), 8))


def test_drawing_leaves_other_generators_unchanged():
    model, state = build(), torch.get_rng_state()
    generate(model, prompt(), new_tokens=3, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), state)


# -- stopping and streaming ---------------------------------------------------------------------------------------


def test_a_stopped_row_is_filled_and_other_rows_continue():
    model, full = build(), generate(build(), prompt(), new_tokens=20)
    stop = int(full[0, 4])
    result = generate(model, prompt(), new_tokens=20, stop=(stop,))
    for row, free in zip(result.tolist(), full.tolist(), strict=True):
        end = free.index(stop) + 1 if stop in free else 20
        assert row == free[:end] + [stop] * (20 - end)


def test_a_stream_ends_with_its_last_row_and_generate_pads():
    model, full = build(), generate(build(), prompt(), new_tokens=20).tolist()
    stop = (full[0][3], full[1][6])
    ends = [min(row.index(s) for s in stop if s in row) for row in full]
    columns = list(stream(model, prompt(), new_tokens=20, stop=stop))
    assert len(columns) == max(ends) + 1
    result = generate(model, prompt(), new_tokens=20, stop=stop)
    assert result.shape == (2, 20)
    assert torch.equal(result[:, : len(columns)], torch.stack(columns, 1))
    assert [set(row[end:]) for row, end in zip(result.tolist(), ends, strict=True)] == [
        {row[end]} for row, end in zip(full, ends, strict=True)
    ]


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


# -- restored state -----------------------------------------------------------------------------------------------


def snapshot(model: Llama):
    return [(b.self_attn.attention, b.run) for b in model.model.layers], [m.training for m in model.modules()]


@contextmanager
def failing(module: nn.Module, after: int):
    """Makes the module raise at call number `after`."""
    calls = []

    def hook(*_):
        calls.append(0)
        if len(calls) > after:
            raise RuntimeError("broken")

    handle = module.register_forward_hook(hook)
    yield
    handle.remove()


def test_the_model_is_restored():
    model = build()
    model.model.layers[1].eval()
    before = snapshot(model)
    generate(model, prompt(), new_tokens=4)
    assert snapshot(model) == before
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("after", [0, 1, 3])
def test_the_model_is_restored_after_an_error(after):
    model = build()
    model.model.layers[0].eval()
    before = snapshot(model)
    with failing(model.model.layers[2].mlp, after), pytest.raises(RuntimeError, match="broken"):
        generate(model, prompt(), new_tokens=5)
    assert snapshot(model) == before
    assert torch.is_grad_enabled()
    assert torch.equal(generate(model, prompt(), new_tokens=5), greedy(model, prompt(), 5))


def test_generation_runs_in_eval_mode_without_gradients():
    model, lengths = build(), []
    model.model.layers[0].mlp.register_forward_hook(
        lambda m, args, out: lengths.append((m.training, out.requires_grad))
    )
    generate(model, prompt(), new_tokens=3)
    assert set(lengths) == {(False, False)}


def test_the_cache_is_allocated_once_and_prompts_get_no_logits():
    model, largest = build(), []
    decoding = Decoding(model, max_new_tokens=6)
    decoding.prompt(prompt(2, 30))
    first, *continuation = prompt(2, 6).unbind(1)
    decoding.step(first)
    buffers = [[x.data_ptr() for x in (*layer.prompt, *layer.new)] for layer in decoding.layers]
    assert {layer.prompt[0].shape for layer in decoding.layers} == {(2, 30, 2, 8)}
    assert {layer.new[0].shape for layer in decoding.layers} == {(2, 6, 2, 8)}

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            storages = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            largest.extend(x.numel() for x in results if x.untyped_storage().data_ptr() not in storages)
            return out

    with Sizes():
        for token in continuation:
            decoding.step(token)
    assert [[x.data_ptr() for x in (*layer.prompt, *layer.new)] for layer in decoding.layers] == buffers
    assert max(largest) < 2 * 30 * 2 * 8  # a prompt's keys; logits are 2 * 60
    with pytest.raises(ValueError, match="room for 36 tokens"):
        decoding.step(prompt(2, 6)[:, 0])


# -- errors -------------------------------------------------------------------------------------------------------


def dense(q, k, v, *, mask, layout):
    return q


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ids": torch.zeros(5, dtype=torch.long)}, r"\[B, N\].*\(5,\) of torch.int64"),
        ({"ids": torch.zeros(1, 0, dtype=torch.long)}, r"\(1, 0\)"),
        ({"ids": torch.zeros(1, 5)}, "of torch.float32"),
        ({"ids": torch.full((1, 5), 60)}, r"ids.*60.*59"),
        ({"new_tokens": 0}, "new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": "low"}, "temperature='low'"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"completions": 0}, "completions=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"layout": SequenceLayout.contiguous(8, 1)}, "9 tokens on 1 "),
        ({"layout": SequenceLayout.contiguous(9, 2)}, "9 tokens on 1 "),
        ({"mask": AttentionMask(causal=False)}, "only causal masks"),
        ({"mask": AttentionMask(documents=[0, 4, 9])}, "only causal masks"),
        ({"model": build("gpt"), "new_tokens": 32}, "9 .*32 .*max_positions=40"),
        ({"model": build(attention=dense)}, "function.*Local"),
    ],
)
def test_mismatched_arguments_are_refused_at_once(change, message):
    arguments = {"model": build(), "ids": prompt(), "new_tokens": 3} | change
    with pytest.raises(ValueError, match=message):
        stream(arguments.pop("model"), arguments.pop("ids"), **arguments)


@pytest.mark.parametrize("option", ["max_new_tokens", "completions"])
def test_decoding_refuses_negative_numbers(option):
    with pytest.raises(ValueError, match=f"{option}=-1"):
        Decoding(build(), **{"max_new_tokens": 1, option: -1})


def test_a_gpt_generates_up_to_its_last_position():
    model = build("gpt")
    assert torch.equal(generate(model, prompt(), new_tokens=31), greedy(model, prompt(), 31))


def test_unknown_blocks_are_refused():
    with pytest.raises(ValueError, match="Linear"):
        Decoding(nn.Linear(2, 2), max_new_tokens=1)


def test_generation_with_a_tied_head():
    model = Llama(replace(LLAMA, tied_embeddings=True)).double()
    initialize(model, seed=0)
    assert torch.equal(generate(model, prompt(), new_tokens=5), greedy(model, prompt(), 5))
