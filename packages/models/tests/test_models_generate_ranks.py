"""Generation with a cache sharded over ranks: methods, layouts and masks compared with a full forward."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from armillary.attention import AttentionMask, Local, Method, build_attention
from armillary.core import CommLedger, SequenceLayout
from armillary.core.testing import relative_error
from armillary.core.testing.rank import mesh
from armillary.models import GPT, Decoding, GPTConfig, Llama, LlamaConfig, generate, initialize, stream
from armillary.models.generation.cache import CacheLayout, extend_run, sizes_after
from armillary.models.generation.decode_collectives import axes_of
from armillary.models.parallel import parallelize

LLAMA = LlamaConfig(vocab_size=60, dim=32, layers=2, heads=4, kv_heads=2, head_dim=6, hidden_dim=48, rope_theta=1e4)
GPT2 = GPTConfig(vocab_size=60, dim=24, layers=2, heads=4, max_positions=64)
WINDOW = AttentionMask(window=(5, None))
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class World(NamedTuple):
    """A method on a mesh."""

    name: str
    ring: int = 1
    ulysses: int = 1

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    def method(self) -> Method:
        return build_attention(self.name, mesh(ring=self.ring, ulysses=self.ulysses))


RING, ULYSSES, USP = World("ring", 4), World("ulysses", 1, 4), World("usp", 2, 2)
WORLDS = [RING, ULYSSES, USP, World("upipe+ring", 2, 2)]
"""The attention package tests methods; these have an axis of each kind, both kinds, and UPipe's stages."""
METHODS = [
    World("all_gather", 4),
    World("token_ring", 4),
    World("wallfacer", 4),
    World("upipe", 1, 4),
    World("ulysses+wallfacer", 2, 2),
]
"""Further methods, which must return their axes."""


def build(
    kind: str, attention: Method, dtype: torch.dtype = torch.float64, config: LlamaConfig | GPTConfig | None = None
) -> Llama | GPT:
    config = config or (LLAMA if kind == "llama" else GPT2)
    model = Llama(config, attention) if isinstance(config, LlamaConfig) else GPT(config, attention)
    initialize(model.double(), seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    return model.to(dtype)


def tokens(rows: int, count: int) -> Tensor:
    return torch.randint(60, (rows, count), generator=torch.Generator().manual_seed(count))


def lopsided(length: int, shards: int) -> SequenceLayout:
    """A layout of one token per shard, with all further tokens on the last."""
    return SequenceLayout([*([range(r, r + 1)] for r in range(shards - 1)), [range(shards - 1, length)]])


def layouts(method: Method, length: int) -> list[SequenceLayout]:
    """One layout of each kind, and one that is far from even."""
    kinds = [method.layout(length, kind) for kind in ("zigzag", "contiguous", "striped")]
    few = length < 2 * method.shards
    return kinds if few or method.head_axis else [*kinds, lopsided(length, method.shards)]


# -- functions that every rank runs -------------------------------------------------------------------------------


def worst_steps(
    world: World, cases: list[tuple[str, AttentionMask | None, tuple[int, ...]]]
) -> list[tuple[float, int]]:
    """Results of `worst_step` for each (model, mask, prompt lengths)."""
    return [worst_step(world, *case) for case in cases]


def worst_step(
    world: World, kind: str, mask: AttentionMask | None, lengths: tuple[int, ...], new: int = 6
) -> tuple[float, int]:
    """Returns (largest error of the logits of a step over layouts and lengths, number of steps)."""
    method, errors = world.method(), []
    model, full = build(kind, method), build(kind, Local())
    for length in lengths:
        ids = tokens(2, length + new)
        expected = full(ids, mask=mask)[:, length - 1 :]
        for layout in layouts(method, length) if length >= world.ranks else [None]:
            decoding = Decoding(model, max_new_tokens=new, mask=mask)
            logits = [decoding.prompt(ids[:, :length], layout)]
            logits += [decoding.step(token) for token in ids[:, length:].unbind(1)]
            errors += [relative_error(result, right) for result, right in zip(logits, expected.unbind(1), strict=True)]
    return max(errors), len(errors)


def axis_sizes() -> list[list[int]]:
    """Sizes of the axes of each of `METHODS`."""
    return [[axis.size for axis in axes_of(world.method())] for world in METHODS]


def same_text(world: World, kind: str) -> list[Tensor]:
    """Greedy and sampled texts in float32; the last is greedy text of one rank."""
    model, ids = build(kind, world.method(), torch.float32), tokens(2, 13)
    return [
        generate(model, ids, new_tokens=8),
        generate(model, ids, new_tokens=8, temperature=3.0, top_p=0.9, seed=4),
        generate(model, ids, new_tokens=8, mask=WINDOW),
        generate(model, ids[:, :1], new_tokens=8),
        generate(build(kind, Local(), torch.float32), ids, new_tokens=8),
    ]


def bytes_of_a_step(world: World, dtype: torch.dtype, lengths: tuple[int, ...]) -> tuple[list[int], list[int], int]:
    """Sent bytes: (per step after each prompt, of those in all-gathers, of the token's broadcast)."""
    model = build("llama", world.method(), dtype)
    totals, gathered = list[int](), list[int]()
    for length in lengths:
        decoding = Decoding(model, max_new_tokens=3)
        decoding.prompt(tokens(2, length))
        with CommLedger() as ledger:
            decoding.step(tokens(2, 1)[:, 0])
        totals.append(ledger.bytes())
        gathered.append(ledger.bytes(kind="all_gather"))
    with CommLedger() as ledger:
        decoding.broadcast_token(tokens(2, 1)[:, 0])
    return totals, gathered, ledger.bytes()


def bytes_of_steps(world: World, dtypes: list[torch.dtype], lengths: tuple[int, ...]):
    return [bytes_of_a_step(world, dtype, lengths) for dtype in dtypes]


def bytes_of_a_prompt(world: World) -> tuple[int, int]:
    """Sent bytes for a prompt: (in a plain forward, in a forward that fills the cache)."""
    method = world.method()
    model, ids = build("llama", method), tokens(2, 16)
    layout = method.layout(16)
    with CommLedger() as plain, torch.no_grad():
        positions = layout.positions(method.shard)
        model(layout.take(ids, method.shard), positions=positions, layout=layout)
    with CommLedger() as ledger:
        Decoding(model, max_new_tokens=1).prompt(ids)
    return plain.bytes(), ledger.bytes()


def text_with_other_seeds(world: World) -> Tensor:
    """Text sampled with another seed on each rank."""
    method = world.method()
    model = build("llama", method)
    return generate(model, tokens(2, 9), new_tokens=8, temperature=3.0, seed=100 + method.shard)


def completions_and_bytes(world: World) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[int, int]], int]:
    """Returns (completions, separate ones), (cache bytes, formula) and bytes sent by a step of 3 completions."""
    method = world.method()
    model, texts, caches = build("llama", method), [], []
    options = {"new_tokens": 6, "temperature": 4.0, "top_k": 40}
    for length in (2, 11):
        ids = tokens(2, length)
        completions = generate(model, ids, completions=3, seed=5, **options)
        separate = [generate(model, ids, seed=5 + j, **options) for j in range(3)]
        texts.append((completions, torch.stack(separate, 1).flatten(0, 1)))
        decoding = Decoding(model, max_new_tokens=5, completions=3)
        decoding.prompt(ids)
        for _ in range(5):
            with CommLedger() as ledger:
                decoding.step(torch.zeros(6, dtype=torch.long))
        cache_bytes = sum(x.nbytes for layer in decoding.layers for x in (*(layer.prompt or ()), *(layer.new or ())))
        prompt_tokens = 0 if length < world.ranks else decoding.layers[0].prompt[0].shape[1]
        room = decoding.cache_layout.new_capacity if decoding.layers[0].new is not None else 0
        row = LLAMA.layers * 2 * LLAMA.kv_heads * LLAMA.head_dim * 8
        caches.append((cache_bytes, (2 * prompt_tokens + 2 * 3 * room) * row))
    return texts, caches, ledger.bytes()


def broadcast_tokens(world: World) -> Tensor:
    """The broadcast tokens when each rank has chosen other ones."""
    method = world.method()
    local_choice = torch.tensor([method.shard + 7, method.shard + 20])
    return Decoding(build("llama", method), max_new_tokens=1).broadcast_token(local_choice)


def refusals(world: World) -> list[str]:
    """Error messages, followed by the bytes sent."""
    method, actual = world.method(), []
    model = build("gpt", method)
    calls = [
        {"new_tokens": 60},
        {"new_tokens": 0},
        {"new_tokens": 4, "layout": method.layout(12)},
        {"new_tokens": 4, "layout": SequenceLayout.contiguous(13, 3)},
        {"new_tokens": 4, "mask": AttentionMask(causal=False)},
    ]
    with CommLedger() as ledger:
        for options in calls:
            try:
                stream(model, tokens(2, 13), **options)
                actual.append("nothing")
            except ValueError as error:
                actual.append(str(error))
    return [*actual, str(ledger.bytes())]


def generate_under_fsdp(ring: int, shard: int) -> list[Tensor]:
    """Text before and after sharding the weights over all ranks with FSDP2."""
    world = mesh(ring=ring, shard=shard)
    model = build("llama", build_attention("ring", world), torch.float32)
    expected = generate(model, tokens(2, 9), new_tokens=6)
    full = world["shard", "ring"]._flatten("fsdp")
    for layer in model.model.layers:
        fully_shard(layer, mesh=full)
    fully_shard(model, mesh=full)
    return [expected, generate(model, tokens(2, 9), new_tokens=6)]


def attention_is_restored(world: World) -> tuple[bool, bool]:
    """Returns whether attention is restored (after an error in a forward, after the next text)."""
    method = world.method()
    model = build("llama", method)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    try:
        generate(model, tokens(1, 9), new_tokens=2)
    except ZeroDivisionError:
        hook.remove()
    restored_after_error = all(layer.self_attn.attention is method for layer in model.model.layers)
    generate(model, tokens(1, 9), new_tokens=2)
    return restored_after_error, all(layer.self_attn.attention is method for layer in model.model.layers)


# -- tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: w.name)
def test_every_step_equals_a_full_forward(worlds, world):
    """Includes prompts shorter than the number of ranks, windows and learned positions."""
    cases = [("llama", None, (1, 3, 4, 17))]
    if world in (RING, USP):
        narrowest = AttentionMask(window=(0, 0))
        cases += [("gpt", None, (13,)), ("llama", WINDOW, (13,)), ("llama", narrowest, (9,))]
    counts = [1 + 1 + 3 + 3, 3, 3, 3] if world.ulysses > 1 else [1 + 1 + 3 + 4, 4, 4, 4]
    for actual in worlds(world.ranks).run(worst_steps, world, cases):
        for case, count, (error, steps) in zip(cases, counts, actual, strict=False):
            assert error < 1e-10, case
            assert steps == count * 7, case


def test_axes_of_every_method(worlds):
    assert worlds(4).run(axis_sizes) == [[[4], [4], [4], [4], [2, 2]]] * 4


@pytest.mark.parametrize("kind, world", [("llama", USP), ("gpt", RING)], ids=["llama", "gpt"])
def test_all_ranks_write_the_same_text(worlds, world, kind):
    answers = worlds(world.ranks).run(same_text, world, kind)
    greedy, drawn, windowed, _, alone = answers[0]
    assert all(torch.equal(a, b) for other in answers for a, b in zip(other, answers[0], strict=True))
    assert torch.equal(greedy, alone)
    assert not torch.equal(drawn, greedy)
    assert not torch.equal(windowed, greedy)


@pytest.mark.parametrize("world", [RING, USP, ULYSSES], ids=lambda w: w.name)
def test_completions_equal_those_of_separate_runs(worlds, world):
    for texts, caches, sent_bytes in worlds(4).run(completions_and_bytes, world):
        assert all(torch.equal(completions, separate) for completions, separate in texts)
        assert all(cache_bytes == formula for cache_bytes, formula in caches)
        # B n H (D e + w) per layer and peer on an axis, for B = 2 prompts with n = 3 completions
        peers = world.ring - 1 + world.ulysses - 1
        assert sent_bytes == peers * 2 * 3 * LLAMA.layers * LLAMA.heads * (6 * 8 + 8)


def test_every_rank_takes_the_token_of_the_first(worlds):
    for actual in worlds(4).run(broadcast_tokens, USP):
        assert actual.tolist() == [7, 20]


def test_every_rank_returns_the_text_of_the_first(worlds):
    texts = worlds(4).run(text_with_other_seeds, USP)
    expected = generate(build("llama", Local()), tokens(2, 9), new_tokens=8, temperature=3.0, seed=100)
    assert all(torch.equal(text, expected) for text in texts)


@pytest.mark.parametrize("world", [RING, USP, ULYSSES], ids=lambda w: w.name)
def test_bytes_of_a_token_match_the_docstring_for_any_prompt(worlds, world):
    rows = LLAMA.layers * 2 * LLAMA.heads
    for actual in worlds(4).run(bytes_of_steps, world, DTYPES, (4, 11)):
        for dtype, (totals, gathered, agreement) in zip(DTYPES, actual, strict=True):
            e, wide = dtype.itemsize, max(dtype.itemsize, 4)
            inner = (world.ulysses - 1) * (6 * e + wide)
            outer = (world.ring - 1) * (6 * (e if world.ulysses == 1 else wide) + wide)
            assert totals == gathered == [rows * (inner + outer)] * 2, dtype
            assert totals[0] <= rows * 3 * (6 * e + wide)
            assert agreement <= 3 * 8 * 2


def test_a_prompt_sends_the_last_hidden_state_and_no_more_than_in_training(worlds):
    answers = worlds(4).run(bytes_of_a_prompt, RING)
    assert {after - plain for plain, after in answers} == {3 * 2 * LLAMA.dim * 8}


def test_mismatched_arguments_are_refused_on_every_rank_before_communication(worlds):
    for *messages, sent_bytes in worlds(2).run(refusals, World("ring", 2)):
        assert sent_bytes == "0"
        assert "max_positions=64" in messages[0]
        assert "new_tokens=0" in messages[1]
        assert "13 tokens on 2 ranks" in messages[2]
        assert "13 tokens on 2 ranks" in messages[3]
        assert "only causal masks" in messages[4]


def test_weights_may_be_sharded(worlds):
    for plain, sharded in worlds(4).run(generate_under_fsdp, 2, 2):
        assert torch.equal(plain, sharded)


def test_attention_is_restored_on_every_rank(worlds):
    assert worlds(2).run(attention_is_restored, World("ring", 2)) == [(True, True)] * 2


# -- the layout of the cache --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4,), (4, 4), (9, 1), (0, 0, 0), (7, 0, 3), (1, 2, 3, 4), (40, 1, 1)])
@pytest.mark.parametrize("new_tokens", [0, 1, 5, 60])
def test_the_cache_has_room_for_the_longest_text_and_at_most_one_token_more(sizes, new_tokens):
    actual, filled = sizes_after(sizes, new_tokens), list(sizes)
    for _ in range(new_tokens):
        filled[filled.index(min(filled))] += 1
    assert all(tokens <= space <= tokens + 1 for tokens, space in zip(filled, actual, strict=True))


def spans_of(cache_layout):
    return *cache_layout.prompt_spans, *cache_layout.new_spans


@pytest.mark.parametrize(
    "prompt", [None, SequenceLayout.zigzag(22, 3), SequenceLayout([[range(1, 9)], [range(1)], [range(9, 11)]])]
)
def test_every_token_is_cached_once_in_few_runs(prompt):
    ranks = [CacheLayout(3, shard, prompt, 50) for shard in range(3)]
    for cache_layout in ranks:
        for _ in range(50):
            cache_layout.add()
    positions = [position for cache_layout in ranks for span in spans_of(cache_layout) for position in span]
    assert sorted(positions) == list(range(ranks[0].length))
    for shard, cache_layout in enumerate(ranks):
        assert sum(map(len, spans_of(cache_layout))) == cache_layout.sizes[shard]
        assert sum(map(len, cache_layout.new_spans)) <= cache_layout.new_capacity
        assert len(spans_of(cache_layout)) <= 6
    assert max(ranks[0].sizes) - min(ranks[0].sizes) <= 1


def test_runs_of_positions_continue_while_the_step_is_the_same():
    runs: list[range] = []
    for position in (3, 4, 5, 8, 11, 14, 15):
        runs[-1:] = extend_run(runs[-1:], position)
    assert runs == [range(3, 6), range(8, 15, 3), range(15, 16)]


class WithoutAxes(Local):
    """A method without axes."""

    shards = 2


def test_a_method_without_axes_is_refused():
    with pytest.raises(ValueError, match=r"WithoutAxes.*2 .*1 .*\.axis"):
        axes_of(WithoutAxes())


# -- tensor parallelism ---------------------------------------------------------------------------------------------


def text_and_logits(model: Llama | GPT) -> tuple[Tensor, Tensor]:
    """Returns (text, the first logits after a prompt)."""
    ids = tokens(2, 11)
    return generate(model, ids, new_tokens=6), Decoding(model, max_new_tokens=1).prompt(ids)


def generate_with_tensor_parallelism(
    kind: str, name: str, axes: dict[str, int], config: LlamaConfig | GPTConfig
) -> tuple[Tensor, Tensor]:
    """The results of `text_and_logits` for a model over a mesh."""
    over = mesh(**axes)
    model = build(kind, Local(), config=config)
    parallelize(model, over, attention=build_attention(name, over), precision=torch.float64)
    return text_and_logits(model)


@pytest.mark.parametrize(
    ("kind", "name", "axes"),
    [
        ("llama", "ring", {"tp": 2, "ring": 2}),
        ("gpt", "ulysses", {"tp": 2, "ulysses": 2}),
        ("llama", "local", {"tp": 2}),
    ],
    ids=str,
)
def test_tensor_parallel_models_generate_the_same(worlds, kind, name, axes):
    config = replace(LLAMA, vocab_size=61) if kind == "llama" else GPT2
    ranks = 2 * axes.get("ring", 1) * axes.get("ulysses", 1)
    plain_text, plain_logits = text_and_logits(build(kind, Local(), config=config))
    for text, logits in worlds(ranks).run(generate_with_tensor_parallelism, kind, name, axes, config):
        assert torch.equal(text, plain_text)
        assert relative_error(logits, plain_logits) < 1e-10
