"""Closed formulas of a step's memory: agreement with the simulation, and plausibility."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from armillary.attention import AttentionMask, AttentionSpec, Saved
from armillary.attention.call.spec import key_heads_of
from armillary.attention.kernels import Scores
from armillary.attention.plans import Sizes
from armillary.attention.tiling.latents import Expansion
from armillary.core.internal import compat
from armillary.core.testing import fake_world
from armillary.models import Checkpointing, GPTConfig, LlamaConfig, StateConfig
from armillary.models.block import Block
from armillary.plan.arguments import is_hybrid
from armillary.plan.memory import AttentionChoice, Job, LiveBytes, SimulatedFlash, SimulatedStep, estimate, simulate
from armillary.plan.memory.tensor_sizes import Widths

U8, R8 = {"ulysses": 8}, {"ring": 8}
LLAMA = replace(LlamaConfig.llama3_8b(), layers=2)
QWEN = replace(LlamaConfig.qwen3_32b(), layers=2)
GPT = replace(GPTConfig.wallfacer_7b(max_positions=2**17), layers=2)
NONE, LAYER, OUTPUT = Checkpointing("none"), Checkpointing("layer"), Checkpointing("attention_output")


def job(model=LLAMA, axes=U8, name="upipe", length=2**18, checkpointing=LAYER, on_host=True, **options):
    options["attention"] = AttentionChoice(name, options.pop("heads_per_stage", None), options.pop("team", None))
    return Job(model=model, axes=axes, length=length, checkpointing=checkpointing, on_host=on_host, **options)


# -- against the simulation -------------------------------------------------------------------------------------------

STATES = StateConfig(heads=16, key_heads=8, key_dim=128, value_dim=128)
"""States of half the width of LLaMA-3-8B's attention."""
HYBRID = replace(LLAMA, layers=3, vocab_size=16_000, mixers=("delta_rule", "mamba2", "attention"), states=STATES)
DELTA = replace(HYBRID, layers=1, mixers=("delta_rule",))
NARROW = replace(LLAMA, layers=5, vocab_size=512, dim=1024, heads=8, kv_heads=2, hidden_dim=1024)
"""So narrow that checkpoints dominate."""
FEW_OUTPUTS = replace(OUTPUT, inputs=3, outputs=4, offload=True, on_device=1)


@pytest.mark.parametrize(
    ("job", "limit"),
    [
        (job(checkpointing=replace(LAYER, offload=True, prefetch=False)), 0.05),
        (job(axes={"ring": 8, "ulysses": 1}, name="upipe+wallfacer", team=2, heads_per_stage=8), 0.05),
        (job(QWEN, R8, "all_gather", checkpointing=replace(OUTPUT, offload=True)), 0.05),
        (job(GPT, {"ring": 4}, "ring", 2**16, replace(NONE, tiled=True), on_host=False, zero_stage=2), 0.05),
        (job(GPT, {"ring": 4}, "ring", 2**15, NONE, on_host=False, zero_stage=1, micro_batches=4), 0.05),
        (job(LLAMA, {"ring": 2, "tp": 4}, "ring", 2**17, on_host=False, zero_stage=2), 0.05),
        # Blocks store different checkpoints: recomputed inputs dominate; block 1 fetches the outputs of block 0.
        (job(NARROW, {"ulysses": 2}, "ulysses", 2**15, replace(LAYER, inputs=1), on_host=False), 0.01),
        (job(NARROW, {"ulysses": 2}, "ulysses", 2**15, FEW_OUTPUTS, on_host=False), 0.01),
        # The chunks of several rows are scanned side by side: as many bytes as one long row, in fewer operations.
        (job(DELTA, {"ring": 4}, "ring", 2**9, NONE, on_host=False, contiguous_states=True, rows=32), 0.04),
        (job(HYBRID, {"ring": 2, "tp": 2}, "ring", 2**8, LAYER, on_host=False, rows=16), 0.04),
    ],
    ids=lambda x: f"{x.attention.name}-{x.checkpointing.policy}-{x.length}" if isinstance(x, Job) else "",
)
def test_the_estimate_agrees_with_the_simulation(job, limit):
    simulated, estimated = simulate(job), estimate(job)
    assert estimated.device == pytest.approx(simulated.device, rel=limit)
    assert estimated.host == pytest.approx(simulated.host, rel=limit)
    # The second rank of the sequence, because states of other ranks enter it.
    assert job.rank == (job.axes.get("tp", 1) if is_hybrid(job.model) else 0)


AFTER_ATTENTION = ("o_proj.", "attn.c_proj.", "post_attention_layernorm.", "ln_2.", "mlp.")


@pytest.mark.parametrize(
    ("model", "mixer"),
    [
        (replace(LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True), "attention"),
        (QWEN, "attention"),
        (GPT, "attention"),
        (replace(LLAMA, mlp_bias=True, out_bias=True, mixers=("delta_rule",), states=STATES), "delta_rule"),
        (replace(LLAMA, mixers=("mamba2",), states=STATES), "mamba2"),
    ],
    ids=["biases", "qwen", "gpt", "delta_rule", "mamba2"],
)
def test_widths_count_the_parameters_of_a_rank(model, mixer):
    with fake_world(tp=2) as mesh:
        step = SimulatedStep.of(job(replace(model, layers=1), {"tp": 2}, "local", on_host=False), mesh)
    block = next(module for module in step.model.modules() if isinstance(module, Block))
    sizes = {name: compat.local_part(x).numel() for name, x in block.named_parameters()}
    after_attention = sum(size for name, size in sizes.items() if any(part in name for part in AFTER_ATTENTION))
    widths = Widths.of(model, mixer).shard(2)
    assert (widths.block, widths.after_attention) == (sum(sizes.values()), after_attention)


TOKENS, DIM = 8192, 128


def sizes(heads, key_heads):
    head = TOKENS * DIM * 2
    return Sizes(heads * head, key_heads * head, heads * TOKENS * 4, 2, heads / key_heads)


LATENT, ROTARY, LATENT_DIM, VALUE_DIM = 512, 64, 192, 128


def latent_sizes(heads):
    """Sizes of a call that sends latents, and expands them to as many heads."""
    token = TOKENS * 2
    return Sizes(
        heads * token * LATENT_DIM,
        (LATENT + ROTARY) / 2 * token,
        heads * TOKENS * 4,
        2,
        1,
        VALUE_DIM / LATENT_DIM,
        heads * (LATENT_DIM + VALUE_DIM) / 2 * token,
        heads * (2 * LATENT_DIM - ROTARY + VALUE_DIM) * token,
    )


def measured(attention, ranks, heads, key_heads, documents=None, latents=False):
    """Peak memory of a method's forward and backward."""
    dim, value_dim = (LATENT_DIM, VALUE_DIM) if latents else (DIM, DIM)
    keys = ((1, ROTARY), (1, LATENT)) if latents else ((key_heads, DIM), (key_heads, DIM))
    with fake_world(**attention.mesh_axes({"ring": ranks})) as mesh:
        method = attention(mesh)
        layout = method.layout(TOKENS * ranks)
        mask = AttentionMask(causal=True, documents=documents)
        call = AttentionSpec(mask, layout, layout, Scores(1.0), key_heads_of(heads, key_heads), SimulatedFlash())
        with FakeTensorMode(allow_non_fake_inputs=True):
            dims = dim, value_dim, value_dim
            q, out, dout = (torch.empty(1, TOKENS, heads, n, dtype=torch.bfloat16) for n in dims)
            k, v = (torch.empty(1, TOKENS, *shape, dtype=torch.bfloat16) for shape in keys)
            lse = torch.empty(1, TOKENS, heads)
            weight = torch.empty(heads, dim - ROTARY + value_dim, LATENT, dtype=q.dtype)
            expansion, expansion_backward = (Expansion.of(q, k, weight, is_backward) for is_backward in (False, True))
            with LiveBytes() as forward:
                method.forward(q, k, v, call, *([expansion] if latents else []))
            with LiveBytes() as backward:
                method.backward(dout, Saved(q, k, v, out, lse), call, *([expansion_backward] if latents else []))
    return forward.device.peak, backward.device.peak


EXACT, WITH_LATENTS = (0.998, 1.002), (0.99, 1.04)
"""Limits of a formula, as a share of the measured peak."""
GROUPED, EQUAL = (32, 8), (16, 16)


def check_formulas(choice, ranks, x, limits, peaks):
    """Compares a method's two formulas for tensors of sizes `x` with the measured peaks."""
    plan = choice.method.sequence_plan(ranks)
    for formula, peak in zip((plan.forward_memory(x, ranks), plan.backward_memory(x, ranks)), peaks, strict=True):
        assert limits[0] * peak <= formula <= limits[1] * peak, x


@pytest.mark.parametrize(
    ("choice", "ranks", "limits"),
    [
        (AttentionChoice("local"), 1, EXACT),
        *((AttentionChoice("ring"), ranks, EXACT) for ranks in (2, 8)),
        *((AttentionChoice("token_ring"), ranks, EXACT) for ranks in (2, 3, 8)),
        (AttentionChoice("wallfacer", team=2), 8, EXACT),
        (AttentionChoice("wallfacer", team=4), 32, EXACT),  # the peak is in the merge
        (AttentionChoice("all_gather"), 8, EXACT),
        (AttentionChoice("ring+ring", nodes=2), 4, EXACT),
        (AttentionChoice("ring+ring", nodes=4), 8, EXACT),
        # TokenRing's formula is for keys of its own node, of which the mask leaves more than of other nodes.
        *((AttentionChoice("ring+token_ring", nodes=nodes), 8, (0.95, 1.31)) for nodes in (2, 4)),
    ],
    ids=lambda x: str(x) if isinstance(x, AttentionChoice | int) else "",
)
def test_formula_of_each_method(choice, ranks, limits):
    for heads in (GROUPED, EQUAL):
        check_formulas(choice, ranks, sizes(*heads), limits, measured(choice, ranks, *heads))


@pytest.mark.parametrize(
    ("choice", "ranks"),
    [
        (AttentionChoice("local"), 1),
        *((AttentionChoice("ring"), ranks) for ranks in (2, 8)),
        (AttentionChoice("token_ring"), 4),
        (AttentionChoice("wallfacer", team=2), 8),
        (AttentionChoice("all_gather"), 4),
        (AttentionChoice("ring+ring", nodes=2), 4),
    ],
    ids=lambda x: str(x),
)
def test_formula_of_each_method_with_latents(choice, ranks):
    for heads in (2, 16):  # latents are larger than the keys of few heads
        peaks = measured(choice, ranks, heads, heads, latents=True)
        check_formulas(choice, ranks, latent_sizes(heads), WITH_LATENTS, peaks)


def test_packed_documents_need_at_most_the_memory_of_the_formula():
    ends, ring = (*range(0, 8 * TOKENS, 3000), 8 * TOKENS), AttentionChoice("ring")
    check_formulas(ring, 8, sizes(*GROUPED), (1 / 1.03, 1 / 0.7), measured(ring, 8, *GROUPED, ends))


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
POLICIES = [NONE, replace(NONE, tiled=True), LAYER, OUTPUT, replace(OUTPUT, offload=True)]
LLAMA_8B = LlamaConfig.llama3_8b()


def test_breakdowns_add_up_and_memory_grows_with_length():
    for (name, axes), model, checkpointing in product(CHOICES, (LLAMA_8B, GPT), POLICIES):
        estimates = [estimate(job(model, axes, name, 2**n, checkpointing)) for n in (13, 14, 17, 20, 24)]
        for x in estimates:
            assert x.device == sum(x.device_breakdown.values()) == max(x.moments.values()), name
            assert x.host == sum(x.host_breakdown.values()), name
        assert all(a.device <= b.device and a.host <= b.host for a, b in pairwise(estimates)), name


def test_upipe_needs_less_with_fewer_heads_per_stage():
    for model in (LLAMA_8B, LlamaConfig.qwen3_32b(), GPT):
        stages = [estimate(job(model, heads_per_stage=n)).device for n in (8, 16, 32)]
        assert stages == sorted(stages)
        assert stages[-1] <= estimate(job(model, name="ulysses")).device
    options = {"length": 2**23, "checkpointing": replace(LAYER, offload=True, prefetch=False)}
    upipe, ulysses = (estimate(job(LLAMA_8B, name=name, **options)) for name in ("upipe", "ulysses"))
    assert upipe.device < 75 * 2**30 < ulysses.device


def test_offloading_moves_checkpoints_and_four_numbers_per_parameter_to_the_host():
    x = 32 * 2**20 // 8 * 4096 * 2
    on_device, on_host = (
        estimate(job(LLAMA_8B, length=2**20, checkpointing=replace(LAYER, offload=offload)))
        for offload in (False, True)
    )
    assert on_host.host_breakdown["checkpoints"] == x
    # On the device stay the checkpoints of this block and, prefetched, of the next one.
    assert on_device.device - on_host.device == pytest.approx(x * 30 / 32)
    on_device, on_host = (estimate(job(LLAMA_8B, on_host=on_host)) for on_host in (False, True))
    assert on_host.host == pytest.approx(16 * LLAMA_8B.parameters() / 8) and on_device.host == 0
    assert on_device.device > on_host.device + 12 * LLAMA_8B.parameters() / 8


def test_eight_million_tokens_fit_with_fewer_stored_inputs():
    """Limits per rank: (2 TB - 100 GB) / 8 = 221.2 GiB on the host, all but 5 GiB = 74.1 GiB on the device."""

    def usage_gib(checkpointing: Checkpointing, length: int) -> tuple[float, float]:
        actual = estimate(job(LLAMA_8B, length=length, checkpointing=checkpointing))
        return actual.device / 2**30, actual.host / 2**30

    every = replace(LAYER, offload=True, prefetch=False)
    fewer = replace(every, inputs=27, on_device=2)
    mixed = replace(OUTPUT, offload=True, prefetch=False, inputs=5, outputs=24, on_device=1)
    assert usage_gib(every, 8_000_000)[1] == pytest.approx(255.6, rel=1e-3)
    for each in (fewer, mixed):
        device, host = usage_gib(each, 8_000_000)
        assert device < 74.1 and host < 221.1
        assert usage_gib(each, 6_860_000)[0] < device
