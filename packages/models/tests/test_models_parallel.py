"""Models on meshes: loss, gradients and weights after a step equal those of the plain model on one rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod

import pytest
import torch
import torch.distributed as dist
from hybrid_models import HYBRID
from latent_models import DIRECT, LATENT
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from armillary.attention import AttentionMask, build_attention
from armillary.core import Axis, SequenceLayout
from armillary.core.internal import compat
from armillary.core.testing import Dispatched, mesh, relative_error
from armillary.models import (
    GPT,
    Checkpointing,
    GPTConfig,
    LabelTriples,
    Llama,
    LlamaConfig,
    generate,
    initialize,
    linear_argmax,
    linear_token_loss,
    parallelize,
    token_logprobs,
    token_loss,
)
from armillary.models.parallel import begin_micro_batch

LLAMA = LlamaConfig(vocab_size=37, dim=32, layers=2, heads=8, kv_heads=4, hidden_dim=48, head_dim=8, qk_norm=True)
# With tp 2, both ulysses ranks share one key/value head.
TIED = replace(LLAMA, tied_embeddings=True, qkv_bias=True, qk_norm=False, vocab_size=40, kv_heads=2)
FEW = replace(LLAMA, vocab_size=5, qk_norm=False, tied_embeddings=True)  # 4 ranks get 2, 2, 1 and 0 rows
LEARNED = GPTConfig(vocab_size=38, dim=32, layers=2, heads=8, max_positions=64)
TIED_HYBRID = replace(HYBRID, mixers=("attention", "mamba2", "delta_rule"), tied_embeddings=True)
OF_STATES = replace(HYBRID, layers=2, mixers=("delta_rule", "mamba2"))
ROWS, N = 4, 64


@dataclass(frozen=True)
class Case:
    """A model on a mesh."""

    axes: Mapping[str, int]
    attention: str
    config: LlamaConfig | GPTConfig = LLAMA
    checkpointing: Checkpointing | None = None
    compiler: str | None = None
    sharded: bool = True
    tokens: int = N
    z_loss: float = 0.0
    packed: bool = False
    """Each row has its own documents, and positions restart at each."""
    zero_stage: int = 3
    layout: str = "zigzag"
    contiguous_states: bool = False

    def mask(self, rows: slice = slice(None)) -> AttentionMask:
        document_ends = [[0, 9 + row, 20 + 3 * row, self.tokens] for row in range(ROWS)]
        return AttentionMask(documents=document_ends[rows] if self.packed else [0, 9, self.tokens])

    def positions(self) -> Tensor:
        """[ROWS, N]"""
        global_ones, rows = torch.arange(self.tokens), range(ROWS)
        if not self.packed:
            return torch.stack([global_ones for _ in rows])
        ends = [torch.tensor(self.mask().boundaries(row)) for row in rows]
        return torch.stack([global_ones - end[torch.bucketize(global_ones, end, right=True) - 1] for end in ends])


def build(config: LlamaConfig | GPTConfig, dtype: torch.dtype) -> Llama | GPT:
    return (Llama(config) if isinstance(config, LlamaConfig) else GPT(config)).to(dtype)


def rows(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(min(37, case.config.vocab_size), (ROWS, case.tokens), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[1, :20] = -100
    return ids, labels


def step(model: Llama | GPT, loss: Tensor) -> dict[str, Tensor]:
    """Gradients and the weights after a step, in float64."""
    loss.backward()
    actual = {f"gradient of {name}": full_tensor(p.grad) for name, p in model.named_parameters()}
    torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True).step()
    return {**actual, **{name: full_tensor(p) for name, p in model.named_parameters()}}


def full_tensor(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().double()


def on_one_rank(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    return plain_step(case.config, case.tokens, case.z_loss, case.packed, dtype)


@cache
def plain_step(
    config: LlamaConfig | GPTConfig, tokens: int, z_loss: float, packed: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    model, case = build(config, dtype), Case({}, "local", config, tokens=tokens, packed=packed)
    initialize(model, 0)
    ids, labels = rows(case)
    options = {"mask": case.mask(), "positions": case.positions()}
    logits = model(ids, **options)
    total, count = model(ids, **options, head=partial(linear_token_loss, labels=labels, z_loss=z_loss))
    return {"logits": full_tensor(logits), "loss": full_tensor(total / count), **step(model, total / count)}


def on_mesh(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """The results of `on_one_rank`; logits are zero outside of this rank's rows and tokens."""
    torch._dynamo.reset()
    over = mesh(**case.axes)
    attend = build_attention(case.attention, over)
    with torch.device("meta"):
        model = build(case.config, dtype)
    precision = dtype if case.sharded else None
    options = {"checkpointing": case.checkpointing, "compiler": case.compiler, "precision": precision}
    options |= {"zero_stage": case.zero_stage, "contiguous_states": case.contiguous_states}
    parallelize(model, over, attention=attend, **options)
    model.to_empty(device="cpu")
    initialize(model, 0)
    layout = attend.layout(case.tokens, case.layout)
    local_rows = local_rows_of(over)
    ids, labels = (layout.take(x[local_rows], attend.shard) for x in rows(case))
    positions = (
        layout.take(case.positions()[local_rows], attend.shard) if case.packed else layout.positions(attend.shard)
    )
    call = partial(model, ids, positions=positions, mask=case.mask(local_rows), layout=layout)
    logits = torch.zeros(ROWS, case.tokens, case.config.vocab_size, dtype=torch.float64)
    logits[local_rows, layout.positions(attend.shard)] = full_tensor(call())
    total, count = call(head=partial(linear_token_loss, labels=labels, z_loss=case.z_loss))
    data = Axis.of(compat.flatten(over, ("replicate", "shard", "ring", "ulysses"), "data"))
    dist.all_reduce(count, group=data.group)
    loss = (total / count).detach().clone()
    for local_result in (loss, logits):
        dist.all_reduce(local_result, group=data.group)
    return {"logits": logits, "loss": loss.double(), **step(model, total / count)}


def local_rows_of(over: DeviceMesh) -> slice:
    replicas = over["replicate"].size() * over["shard"].size()
    replica = over["replicate"].get_local_rank() * over["shard"].size() + over["shard"].get_local_rank()
    return slice(replica * ROWS // replicas, (replica + 1) * ROWS // replicas)


def compare(case: Case, float64: dict[str, Tensor], float32: dict[str, Tensor]) -> list[str]:
    """Names and errors of tensors that differ from one rank's, in float64, and on two ranks in float32 too."""
    smallest_norm = 1e-6 * max(
        x.norm().item() for name, x in float64.items() if name.startswith("gradient")
    )  # gradients of key biases are 0
    counters, faults = torch._dynamo.utils.counters, list[str]()
    counters.clear()
    actual = on_mesh(case, torch.float64)
    if case.compiler is not None and case.checkpointing is None:  # one graph for each kind of block
        graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
        faults += [] if graphs >= case.config.layers and not breaks else [f"{graphs} graphs, breaks {breaks}"]
    for name in float64:
        error = ((actual[name] - float64[name]).norm() / float64[name].norm().clamp(min=smallest_norm)).item()
        faults += [] if error < 1e-9 else [f"{name}: {error:.1e} in float64"]
    if case.compiler is not None or dist.get_world_size() > 2:
        return faults
    actual = on_mesh(case, torch.float32)
    for name in float64:
        # One rank's float32 cancels too. Weights are exempt, because Adam's first step is the sign of a gradient.
        limit = 1e-5 * float64[name].norm() + 2 * (float32[name] - float64[name]).norm()
        fits = (actual[name] - float64[name]).norm() <= limit or name.startswith(("model.", "transformer.", "lm_head"))
        faults += [] if fits else [f"{name}: {relative_error(actual[name], float64[name]):.1e} in float32"]
    return faults


KEEP = Checkpointing("attention_output", chunk=3)
FEW_INPUTS = replace(KEEP, inputs=2)
RECOMPUTE = replace(KEEP, inputs=1, outputs=1, offload=True)
LAYER = Checkpointing("layer")
TILED = Checkpointing(tiled=True, chunk=5)
# The attention package tests all methods; these cover every mesh axis and every kind of block.
GROUPS = {
    "4 ranks": [
        Case({"tp": 2, "ulysses": 2}, "upipe", TIED, RECOMPUTE, z_loss=1e-2, packed=True),
        Case({"replicate": 2, "ulysses": 2}, "upipe", LEARNED, LAYER, zero_stage=2),
        Case({"tp": 4}, "local", FEW, KEEP, sharded=False, tokens=13),
        Case({"tp": 2, "ring": 2}, "ring", tokens=43),
    ],
    "4 ranks, hybrid": [
        Case({"ring": 2, "ulysses": 2}, "usp", TIED_HYBRID, FEW_INPUTS, packed=True, tokens=43, contiguous_states=True),
        Case({"tp": 2, "ring": 2}, "ring", HYBRID, LAYER, packed=True, tokens=43),
    ],
    "4 ranks, latents": [
        Case({"tp": 2, "ulysses": 2}, "upipe", LATENT, KEEP, packed=True),
        Case({"ring": 2, "ulysses": 2}, "usp", DIRECT, RECOMPUTE, packed=True, tokens=43),
        Case({"shard": 2, "ulysses": 2}, "upipe", DIRECT, TILED, tokens=43, zero_stage=2),
    ],
    "2 ranks": [
        Case({"tp": 2}, "local", TIED, LAYER, sharded=False),
        Case({"tp": 2}, "local", LEARNED, TILED, sharded=False),
        Case({"ring": 2}, "ring", LATENT, LAYER, packed=True, tokens=43),
        Case({"ring": 2}, "ring", HYBRID, TILED, layout="contiguous", packed=True),
    ],
    "compiled": [
        Case({"ulysses": 2}, "ulysses", replace(TIED, layers=1), KEEP, compiler="aot_eager"),
        Case({"ring": 2}, "ring", OF_STATES, compiler="aot_eager", packed=True),
    ],
}
"""Cases of equal world sizes, which run in the same processes so that torch's caches are warm."""


def compare_all(cases: list[Case], expected: list[list[dict[str, Tensor]]]) -> list[str]:
    return [f"{case}: {fault}" for case, one in zip(cases, expected, strict=True) for fault in compare(case, *one)]


@pytest.mark.parametrize("group", GROUPS)
def test_loss_gradients_and_a_step_equal_one_rank(worlds, group):
    cases = GROUPS[group]
    expected = [[on_one_rank(case, dtype) for dtype in (torch.float64, torch.float32)] for case in cases]
    for faults in worlds(prod(cases[0].axes.values())).run(compare_all, cases, expected, timeout=300):
        assert not faults


def refused_dtensors() -> None:
    """Models and losses name an argument that is a DTensor, before they send anything."""
    over = mesh(ring=2, tp=2)
    llama, gpt = build(LLAMA, torch.float32), build(LEARNED, torch.float32)
    for model in (llama, gpt):
        parallelize(model, over, attention=build_attention("ring", over), precision=None)

    def placed(*shape: int, dtype: torch.dtype = torch.int64) -> DTensor:
        return DTensor.from_local(torch.zeros(shape, dtype=dtype), over["ring"], [Shard(1 % len(shape))])

    float_placed = partial(placed, dtype=torch.float32)
    ids, some, hidden, weight = torch.zeros(1, 4).long(), torch.zeros(4).long(), torch.zeros(1, 4, 8), torch.zeros(9, 8)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("ids", lambda: llama(placed(1, 4), layout=SequenceLayout.zigzag(8, 2))),
        ("ids", lambda: gpt(placed(1, 4), positions=some)),
        ("ids", lambda: llama.model(placed(1, 4), positions=some)),
        ("ids", lambda: generate(llama, placed(1, 4), new_tokens=1)),
        ("positions", lambda: llama(ids, positions=placed(4))),
        ("logits", lambda: token_loss(float_placed(1, 4, 9), ids)),
        ("labels", lambda: token_loss(torch.zeros(1, 4, 9), placed(1, 4))),
        ("hidden", lambda: linear_token_loss(float_placed(1, 4, 8), weight, ids)),
        ("labels", lambda: linear_token_loss(hidden, weight, placed(1, 4))),
        ("hidden", lambda: linear_argmax(float_placed(1, 4, 8), weight, ids)),
        ("labels", lambda: linear_argmax(hidden, weight, placed(1, 4))),
        ("hidden", lambda: token_logprobs(float_placed(1, 4, 8), weight, ids)),
        ("labels", lambda: token_logprobs(hidden, weight, placed(1, 4))),
        ("positions", lambda: token_logprobs(hidden, weight, some, placed(4))),
        ("weights", lambda: LabelTriples(some, some, float_placed(4), (1, 4))),
    ]
    for name, call in calls:
        with Dispatched() as dispatched, pytest.raises(ValueError, match=rf"^{name} is a DTensor.* {name}\.to_local"):
            call()
        assert not dispatched.sent


def test_dtensors_are_refused_by_name_before_communication(worlds):
    worlds(4).run(refused_dtensors)


def out_of_range_raises() -> None:
    over = mesh(tp=4)
    llama, gpt = build(LLAMA, torch.float32), build(LEARNED, torch.float32)
    for model in (llama, gpt):
        parallelize(model, over, precision=None)
    for call in (
        lambda: llama(torch.tensor([[1, 2, 99, 3]])),
        lambda: llama(torch.tensor([[1, 2, -99, 3]])),
        lambda: llama(torch.tensor([[1, 2, -1, 3]])),  # not the last row of the table
        lambda: gpt(torch.tensor([[1, 2]]), positions=torch.tensor([63, 64])),
        lambda: gpt(torch.tensor([[1, 2]]), positions=torch.tensor([0, -1])),
    ):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            call()


def test_ids_and_positions_out_of_range_raise_on_every_rank(worlds):
    worlds(4).run(out_of_range_raises)


def gradients_of_two_micro_batches(zero_stage: int) -> list[float]:
    """Returns the squared norm of each gradient, where rank 3 of `tp` has no row of the vocabulary's 5."""
    config = LlamaConfig(vocab_size=5, dim=16, layers=1, heads=4, kv_heads=4, hidden_dim=16)
    model = Llama(config)
    initialize(model, seed=0)
    parallelize(model, mesh(ring=1, tp=4), zero_stage=zero_stage)
    for last in (False, True):
        if zero_stage == 1:
            begin_micro_batch(model, last)
        model(torch.tensor([[0, 1, 2, 4]])).square().sum().backward()
    return [float(parameter.grad.full_tensor().square().sum()) for parameter in model.parameters()]


def test_a_rank_without_rows_accumulates_under_every_zero_stage(worlds):
    world = worlds(4)
    assert world.run(gradients_of_two_micro_batches, 1) == world.run(gradients_of_two_micro_batches, 3)
