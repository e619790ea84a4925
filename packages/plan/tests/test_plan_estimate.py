"""Closed formulas of a step's memory: agreement with the simulation, and plausibility."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from armillary.attention import AttentionMask, AttentionSpec, Saved, UPipe, WallFacer
from armillary.attention.call.spec import key_heads_of
from armillary.attention.kernels import Scores
from armillary.attention.plans import Sizes
from armillary.core.parts import compat, simulating
from armillary.core.testing import fake_world
from armillary.models import Checkpointing, GPTConfig, LlamaConfig, StateConfig
from armillary.models.block import Block
from armillary.plan.memory import AttentionChoice, Job, LiveBytes, SimulatedFlash, SimulatedStep, estimate, simulate
from armillary.plan.memory.sizes import Widths

U8, R8 = {"ulysses": 8}, {"ring": 8}
LLAMA = replace(LlamaConfig.llama3_8b(), layers=2)
QWEN = replace(LlamaConfig.qwen3_32b(), layers=2)
GPT = replace(GPTConfig.wallfacer_7b(max_positions=2**17), layers=2)
LAYER, OUTPUT = Checkpointing("layer"), Checkpointing("attention_output")


def job(model=LLAMA, axes=U8, name="upipe", length=2**19, checkpointing=LAYER, on_host=True, **options):
    attention = AttentionChoice(name, options.pop("heads_per_stage", None), options.pop("team", None))
    return Job(
        model=model,
        axes=axes,
        attention=attention,
        length=length,
        checkpointing=checkpointing,
        on_host=on_host,
        **options,
    )


# -- against the simulation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job",
    [
        job(length=2**20, checkpointing=replace(LAYER, offload=True, prefetch=False)),
        pytest.param(
            job(replace(LLAMA, layers=1), {"ring": 2, "ulysses": 4}, "upipe+ring", heads_per_stage=8, on_host=False),
            marks=pytest.mark.long,
        ),
        pytest.param(
            job(name="ulysses", checkpointing=replace(LAYER, offload=True), on_host=False), marks=pytest.mark.long
        ),
        pytest.param(
            job(axes={"ring": 2, "ulysses": 4}, name="usp", checkpointing=OUTPUT, on_host=False), marks=pytest.mark.long
        ),
        pytest.param(job(axes={"ring": 16}, name="wallfacer", team=2), marks=pytest.mark.long),
        job(axes={"ring": 8, "ulysses": 1}, name="upipe+wallfacer", team=2, heads_per_stage=8),
        pytest.param(job(replace(LLAMA, layers=1), axes={"ring": 4}, name="token_ring"), marks=pytest.mark.long),
        job(QWEN, axes=R8, name="all_gather", checkpointing=replace(OUTPUT, offload=True)),
        pytest.param(job(GPT, axes=R8, name="wallfacer", team=2, length=2**17, on_host=False), marks=pytest.mark.long),
        job(GPT, axes=R8, name="ring", length=2**17, checkpointing=Checkpointing("none"), on_host=False),
        pytest.param(
            job(GPT, {"ring": 4, "tp": 2}, "ring", 2**17, Checkpointing("none"), on_host=False), marks=pytest.mark.long
        ),
        job(GPT, {"ring": 4}, "ring", 2**17, Checkpointing("none", tiled=True), on_host=False, zero_stage=2),
        job(axes={"ring": 2, "tp": 4}, name="ring", length=2**18, on_host=False, zero_stage=2),
        pytest.param(
            job(GPT, {"ring": 4}, "ring", 2**15, on_host=False, zero_stage=1, micro_batches=2), marks=pytest.mark.long
        ),
        job(GPT, {"ring": 4}, "ring", 2**15, Checkpointing("none"), on_host=False, zero_stage=1, micro_batches=4),
        pytest.param(
            job(axes={"ulysses": 2, "tp": 4}, length=2**18, checkpointing=OUTPUT, on_host=False), marks=pytest.mark.long
        ),
    ],
    ids=lambda job: f"{job.attention.name}-{job.checkpointing.policy}-{job.length}-tp{job.axes.get('tp', 1)}",
)
def test_the_estimate_agrees_with_the_simulation(job):
    simulated, estimated = simulate(job), estimate(job)
    assert estimated.device == pytest.approx(simulated.device, rel=0.05)
    assert estimated.host == pytest.approx(simulated.host, rel=0.05)


@pytest.mark.parametrize(
    "checkpointing",
    [
        replace(LAYER, inputs=1),  # of 5 blocks, so that recomputed inputs dominate
        pytest.param(replace(LAYER, inputs=1, offload=True, prefetch=False), marks=pytest.mark.long),
        replace(OUTPUT, inputs=3, outputs=4, offload=True, on_device=1),
        replace(OUTPUT, offload=True),  # block 1 fetches the outputs of block 0
    ],
    ids=lambda each: f"{each.policy}-{each.inputs}-{each.outputs}-{each.on_device}",
)
def test_the_estimate_agrees_when_blocks_store_different_checkpoints(checkpointing):
    narrow = replace(LLAMA, layers=5, vocab_size=512, hidden_dim=4096)  # so that checkpoints dominate
    one = job(narrow, {"ulysses": 2}, "ulysses", 2**17, checkpointing, on_host=False)
    simulated, estimated = simulate(one), estimate(one)
    assert estimated.device == pytest.approx(simulated.device, rel=0.01)
    assert estimated.host == pytest.approx(simulated.host, rel=0.01)


DELTA, MAMBA, MIXED = ("delta_rule",), ("mamba2",), ("delta_rule", "mamba2", "attention")


def hybrid(mixers, axes, name, tokens, checkpointing, layers=3, **options):
    """A step of `tokens` tokens of each row per rank, with states of half the width of LLaMA-3-8B's attention.

    The chunks of several rows are scanned side by side: as many bytes as in one long row, in fewer operations.
    """
    states = StateConfig(heads=16, key_heads=8, key_dim=128, value_dim=128)
    model = replace(LLAMA, layers=layers, vocab_size=16_000, mixers=mixers, states=states)
    ranks = axes.get("ring", 1) * axes.get("ulysses", 1)
    return job(model, axes, name, tokens * ranks, checkpointing, on_host=False, **options)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(hybrid(DELTA, {}, "local", 1024, LAYER, layers=1, rows=4), marks=pytest.mark.long),
        hybrid(DELTA, {"ring": 8}, "ring", 1024, Checkpointing("none"), layers=1, rows=8),
        pytest.param(hybrid(MAMBA, {"ring": 4}, "ring", 8192, OUTPUT, layers=2), marks=pytest.mark.long),
        pytest.param(
            hybrid(MIXED, {"ring": 2, "ulysses": 2}, "usp", 1024, replace(LAYER, offload=True), rows=4),
            marks=pytest.mark.long,
        ),
        pytest.param(
            hybrid(MIXED, {"ring": 4}, "upipe+ring", 1024, Checkpointing("none", tiled=True), zero_stage=2, rows=4),
            marks=pytest.mark.long,
        ),
        hybrid(MIXED, {"ring": 2, "tp": 2}, "ring", 1024, LAYER, rows=4),
        hybrid(MIXED, {"ring": 4}, "ring", 1024, OUTPUT, contiguous_states=True, rows=4),
        pytest.param(hybrid(MIXED, {"ring": 4}, "ring", 4096, replace(OUTPUT, inputs=2), 5), marks=pytest.mark.long),
    ],
    ids=lambda job: f"{'-'.join(job.model.mixers)}-{job.checkpointing.policy}",
)
def test_the_estimate_of_a_hybrid_agrees_with_the_simulation(job):
    simulated, estimated = simulate(job), estimate(job)
    assert estimated.device == pytest.approx(simulated.device, rel=0.04)
    assert estimated.host == pytest.approx(simulated.host, rel=0.04)


AFTER_ATTENTION = ("o_proj.", "attn.c_proj.", "post_attention_layernorm.", "ln_2.", "mlp.")
STATES = StateConfig(heads=16, key_heads=8, key_dim=128, value_dim=128)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("model", "mixer"),
    [
        (replace(LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True), "attention"),
        (QWEN, "attention"),
        (GPT, "attention"),
        (replace(LLAMA, mlp_bias=True, out_bias=True, mixers=DELTA, states=STATES), "delta_rule"),
        (replace(LLAMA, mixers=MAMBA, states=STATES), "mamba2"),
    ],
    ids=["biases", "qwen", "gpt", "delta_rule", "mamba2"],
)
def test_widths_count_the_parameters_of_a_rank(model, mixer, tp):
    with fake_world(tp=tp) as mesh:
        step = SimulatedStep.of(job(model, {"tp": tp}, "local", on_host=False), mesh)
    block = next(module for module in step.model.modules() if isinstance(module, Block))
    sizes = {name: compat.local_part(x).numel() for name, x in block.named_parameters()}
    after_attention = sum(size for name, size in sizes.items() if any(part in name for part in AFTER_ATTENTION))
    widths = Widths.of(model, mixer).shard(tp)
    assert (widths.block, widths.after_attention) == (sum(sizes.values()), after_attention)


def test_hybrids_are_simulated_on_a_rank_with_incoming_states():
    one = hybrid(DELTA, {"ring": 4}, "ring", 1024, LAYER, layers=1, rows=4)
    with fake_world(**one.axes) as mesh:
        step = SimulatedStep.of(one, mesh)
        with FakeTensorMode(allow_non_fake_inputs=True), simulating():
            first = step.run()
    assert one.rank == 1 and first.device < 0.97 * simulate(one).device


@pytest.mark.parametrize("heads", [(32, 8), (16, 16)])
@pytest.mark.parametrize(
    ("name", "ranks", "team"),
    [
        *(("ring", ranks, None) for ranks in (2, 8)),
        *(("token_ring", ranks, None) for ranks in (2, 3, 8)),
        *(("wallfacer", ranks, team) for ranks, team in ((4, 2), (8, 2), (32, 4))),  # 4: the peak is in the merge
        *(("all_gather", ranks, None) for ranks in (8,)),
        ("local", 1, None),
    ],
)
def test_formula_of_each_method(name, ranks, team, heads):
    choice, x = AttentionChoice(name, team=team), sizes(*heads)
    plan = choice.method.sequence_plan(ranks)
    estimates = plan.forward_memory(x, ranks), plan.backward_memory(x, ranks)
    assert estimates == pytest.approx(measured(choice, ranks, *heads), rel=0.002)


@pytest.mark.parametrize("heads", [(32, 8), (16, 16)])
@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (8, 2), (8, 4), pytest.param(16, 4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["ring+ring", "ring+token_ring"])
def test_formula_of_a_ring_between_nodes(name, ranks, nodes, heads):
    """TokenRing's formula is for keys of its own node, of which the mask leaves more than of other nodes."""
    choice, x = AttentionChoice(name, nodes=nodes), sizes(*heads)
    plan = choice.method.sequence_plan(ranks)
    estimates = plan.forward_memory(x, ranks), plan.backward_memory(x, ranks)
    actual = measured(choice, ranks, *heads)
    lowest, highest = (0.998, 1.002) if name == "ring+ring" else (0.95, 1.31)
    assert all(lowest * peak < formula < highest * peak for formula, peak in zip(estimates, actual, strict=True))


TOKENS, DIM = 8192, 128


def sizes(heads, key_heads):
    head = TOKENS * DIM * 2
    return Sizes(heads * head, key_heads * head, heads * TOKENS * 4, 2, heads / key_heads)


def test_packed_documents_need_at_most_the_memory_of_the_formula():
    ends = (*range(0, 8 * TOKENS, 3000), 8 * TOKENS)
    choice = AttentionChoice("ring")
    actual = measured(choice, 8, 32, 8, ends)
    x, plan = sizes(32, 8), choice.method.sequence_plan(8)
    estimates = plan.forward_memory(x, 8), plan.backward_memory(x, 8)
    assert all(0.7 * formula < peak < 1.03 * formula for peak, formula in zip(actual, estimates, strict=True))


def measured(attention, ranks, heads, key_heads, documents=None):
    """Peak memory of a method's forward and backward."""
    with fake_world(**attention.mesh_axes({"ring": ranks})) as mesh:
        method = attention(mesh)
        layout = method.layout(TOKENS * ranks)
        mask = AttentionMask(causal=True, documents=documents)
        call = AttentionSpec(mask, layout, layout, Scores(1.0), key_heads_of(heads, key_heads), SimulatedFlash())
        with FakeTensorMode(allow_non_fake_inputs=True):
            q, out, dout = (torch.empty(1, TOKENS, heads, DIM, dtype=torch.bfloat16) for _ in range(3))
            k, v = (torch.empty(1, TOKENS, key_heads, DIM, dtype=torch.bfloat16) for _ in range(2))
            lse = torch.empty(1, TOKENS, heads)
            with LiveBytes() as forward:
                method.forward(q, k, v, call)
            with LiveBytes() as backward:
                method.backward(dout, Saved(q, k, v, out, lse), call)
    return forward.device.peak, backward.device.peak


# -- plausibility -----------------------------------------------------------------------------------------------------

CHOICES = [
    ("upipe", U8),
    ("ulysses", U8),
    ("usp", {"ring": 2, "ulysses": 4}),
    ("upipe+ring", {"ring": 2, "ulysses": 4}),
    ("ulysses+wallfacer", {"ring": 4, "ulysses": 2}),
    ("ring", R8),
    ("token_ring", R8),
    ("wallfacer", R8),
    ("all_gather", R8),
]
POLICIES = [Checkpointing(), Checkpointing(tiled=True), LAYER, OUTPUT, replace(OUTPUT, offload=True)]


@pytest.mark.parametrize(("name", "axes"), CHOICES)
def test_breakdowns_add_up_and_memory_grows_with_length(name, axes):
    for model, checkpointing in product((LlamaConfig.llama3_8b(), GPT), POLICIES):
        estimates = [estimate(job(model, axes, name, 2**n, checkpointing)) for n in (13, 14, 17, 20, 24)]
        for x in estimates:
            assert x.device == sum(x.device_breakdown.values()) == max(x.moments.values())
            assert x.host == sum(x.host_breakdown.values())
        assert all(a.device <= b.device and a.host <= b.host for a, b in pairwise(estimates))


@pytest.mark.parametrize("model", [LlamaConfig.llama3_8b(), LlamaConfig.qwen3_32b(), GPT], ids=["llama", "qwen", "gpt"])
def test_fewer_heads_per_stage_need_less(model):
    stages = [estimate(job(model, heads_per_stage=n)).device for n in (8, 16, 32)]
    assert stages == sorted(stages)
    assert stages[-1] <= estimate(job(model, name="ulysses")).device


def test_offloading_moves_checkpoints_to_the_host():
    model = LlamaConfig.llama3_8b()
    checkpoint_bytes = 32 * 2**20 // 8 * 4096 * 2
    on_device, on_host = (
        estimate(job(model, length=2**20, checkpointing=replace(LAYER, offload=x))) for x in (False, True)
    )
    assert on_host.host_breakdown["checkpoints"] == checkpoint_bytes
    assert on_device.device - on_host.device == pytest.approx(
        checkpoint_bytes * 30 / 32
    )  # the checkpoints of this block and, prefetched, of the next one


def test_the_host_has_four_numbers_per_parameter():
    model = LlamaConfig.llama3_8b()
    on_device, on_host = estimate(job(on_host=False, model=model)), estimate(job(model=model))
    assert on_host.host == pytest.approx(16 * model.parameters() / 8)
    assert on_device.host == 0
    assert on_device.device > on_host.device + 12 * model.parameters() / 8


def test_only_upipe_fits_eight_million_tokens_on_eight_ranks():
    options = {"length": 2**23, "checkpointing": replace(LAYER, offload=True, prefetch=False)}
    upipe, ulysses = (estimate(job(LlamaConfig.llama3_8b(), name=name, **options)) for name in ("upipe", "ulysses"))
    assert upipe.device < 75 * 2**30 < ulysses.device


def usage_gib(checkpointing: Checkpointing, length: int) -> tuple[float, float]:
    """Returns GiB on the device and on the host for LLaMA-3-8B on 8 ranks."""
    actual = estimate(job(LlamaConfig.llama3_8b(), length=length, checkpointing=checkpointing))
    return actual.device / 2**30, actual.host / 2**30


def test_eight_million_tokens_fit_with_fewer_stored_inputs():
    """Limits per rank: (2 TB - 100 GB) / 8 = 221.2 GiB on the host, all but 5 GiB = 74.1 GiB on the device."""
    every = replace(LAYER, offload=True, prefetch=False)
    fewer = replace(every, inputs=27, on_device=2)
    mixed = replace(OUTPUT, offload=True, prefetch=False, inputs=5, outputs=24, on_device=1)
    assert usage_gib(every, 8_000_000)[1] == pytest.approx(255.6, rel=1e-3)
    for each in (fewer, mixed):
        device, host = usage_gib(each, 8_000_000)
        assert device < 74.1 and host < 221.1
        assert usage_gib(each, 6_860_000)[0] < device


def test_an_attention_choice_builds_its_method():
    with fake_world(ring=4, ulysses=2) as mesh:
        method = AttentionChoice("upipe+wallfacer", heads_per_stage=4, team=2)(mesh)
    assert isinstance(method, UPipe)
    assert isinstance(method.inner, WallFacer)
    assert (method.heads_per_stage, method.inner.teams.team_size) == (4, 2)
