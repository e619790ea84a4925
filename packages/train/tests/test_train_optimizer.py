"""Schedules, AdamW's parameter groups, and clipping by the global norm."""

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from armillary.attention import build_attention
from armillary.core import clip_gradients
from armillary.core.testing import mesh
from armillary.models import GPT, GPTConfig, Llama, LlamaConfig, initialize, linear_token_loss, parallelize
from armillary.train import OptimizerConfig
from armillary.train.internal import build_optimizer
from armillary.train.optimizer import learning_rate, schedule_notes

# -- schedules --------------------------------------------------------------------------------------------------------


def rates(schedule, steps=20, warmup=4, decay=None, lr=1.0):
    config = OptimizerConfig(lr=lr, min_lr=0.1, schedule=schedule, warmup_steps=warmup, decay_steps=decay)
    return [learning_rate(step, steps, config) for step in range(1, steps + 1)]


SCHEDULES = {"cosine": 0.1, "linear": 0.1, "wsd": 0.1, "constant": 1.0}
"""Rate of the last step by schedule."""


def test_every_schedule_warms_up_linearly_and_never_rises_later():
    for schedule, last in SCHEDULES.items():
        actual = rates(schedule)
        assert actual[:4] == [0.25, 0.5, 0.75, 1.0]
        assert all(a >= b for a, b in pairwise(actual[3:]))
        assert actual[-1] == pytest.approx(last)
        assert 0.9 < rates(schedule, warmup=0)[0] <= 1.0  # without warm-up the first step follows the schedule
        assert rates(schedule, steps=1, warmup=0) == pytest.approx([last])


def test_shapes_of_schedules():
    cosine = rates("cosine")
    assert cosine[11] == pytest.approx(0.55)  # halfway in the middle, and flat at both ends
    assert cosine[4] > 0.99 and cosine[-2] < 0.11
    assert [a - b for a, b in pairwise(rates("linear")[3:])] == pytest.approx([0.9 / 16] * 16)
    assert rates("wsd")[3:18] == [1.0] * 15  # by default the last tenth of 20 steps decays
    assert rates("wsd")[18:] == pytest.approx([0.55, 0.1])
    assert rates("wsd", decay=3)[16:] == pytest.approx([1.0, 0.7, 0.4, 0.1])
    assert rates("wsd", decay=16)[3:] == pytest.approx(rates("linear")[3:])
    assert rates("wsd", steps=3, warmup=0) == pytest.approx([1.0, 1.0, 0.1])  # a tenth is less than one step


def test_a_warm_up_longer_than_the_run_is_cut_to_half_of_it_with_a_note():
    for (schedule, last), warmup in product(SCHEDULES.items(), (6, 99)):
        actual = rates(schedule, steps=6, warmup=warmup)
        assert actual[:3] == pytest.approx([1 / 3, 2 / 3, 1.0]) and actual[-1] == pytest.approx(last)
        config = OptimizerConfig(warmup_steps=warmup, schedule=schedule)
        (line,) = schedule_notes(0, 6, config)
        assert line == f"warm-up: 3 of 6 steps; --optimizer.warmup-steps {warmup} would not end before the run does"
        assert schedule_notes(0, warmup + 1, config) == [] and schedule_notes(6, 6, config) == [line]


def test_a_resumed_run_prints_its_learning_rate():
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4)
    (line,) = schedule_notes(20, 36, config)  # the first run had decayed to 0.1
    assert line == "learning rate of step 21: 5.06e-01, on a schedule of 36 steps in all"
    assert schedule_notes(20, 20, config) == []


# -- groups -----------------------------------------------------------------------------------------------------------

LLAMA = LlamaConfig(vocab_size=37, dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48, qkv_bias=True, qk_norm=True)
LEARNED = GPTConfig(vocab_size=38, dim=32, layers=2, heads=4, max_positions=16)
NOT_DECAYED = {
    "llama": {"norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"}
    | {f"{x}_norm.weight" for x in "qk"}
    | {f"{x}_proj.bias" for x in "qkv"},
    "gpt": {f"{x}.{kind}" for x in ("ln_1", "ln_2", "ln_f") for kind in ("weight", "bias")}
    | {f"{x}_proj.bias" for x in "qkvc"}
    | {"c_fc.bias"},
}
TABLES = {"llama": {"embed_tokens.weight"}, "gpt": {"wte.weight", "wpe.weight"}}


@pytest.mark.parametrize(("name", "embeddings"), [("llama", True), ("gpt", False)])
def test_matrices_are_decayed_and_norms_and_biases_are_not(name, embeddings):
    model = Llama(LLAMA) if name == "llama" else GPT(LEARNED)
    config = OptimizerConfig(weight_decay=0.3, decay_embeddings=embeddings, eps=1e-6, beta1=0.8, beta2=0.7)
    optimizer = build_optimizer(model, config)
    undecayed = {id(p) for group in optimizer.param_groups if not group["weight_decay"] for p in group["params"]}
    names = {".".join(n.split(".")[-2:]) for n, p in model.named_parameters() if id(p) in undecayed}
    assert names == NOT_DECAYED[name] | (set() if embeddings else TABLES[name])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    assert [optimizer.defaults[name] for name in ("eps", "betas", "fused")] == [1e-6, (0.8, 0.7), True]


# -- clipping ---------------------------------------------------------------------------------------------------------


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Full gradients on every rank."""
    actual = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in actual]


def norm_of(gradients: list[Tensor]) -> float:
    return torch.cat([g.flatten().double() for g in gradients]).norm().item()


def clipped(axes: dict[str, int], dtype: torch.dtype) -> tuple[float, float, float, int]:
    """One step on a mesh. Returns (reported norm, norm of full gradients, norm after clipping, parameter count)."""
    over = mesh(**{"shard": 1} | axes)
    attention = build_attention("usp", over)
    with torch.device("meta"):
        model = Llama(LLAMA).to(dtype)
    parallelize(model, over, attention=attention, precision=dtype)
    model.to_empty(device="cpu")
    initialize(model, 0)
    replicas = over["replicate"].size() * over["shard"].size()
    replica = over["replicate"].get_local_rank() * over["shard"].size() + over["shard"].get_local_rank()
    tokens = torch.randint(LLAMA.vocab_size, (4, 17), generator=torch.Generator().manual_seed(0))
    local_rows = tokens[replica::replicas]
    layout = attention.layout(16)
    ids, labels = (layout.take(x, attention.shard) for x in (local_rows[:, :-1], local_rows[:, 1:]))
    positions = layout.positions(attention.shard)
    head = lambda *args, **kwargs: linear_token_loss(*args, labels=labels, **kwargs)  # noqa: E731
    model(ids, positions=positions, layout=layout, head=head)[0].backward()
    before = gradients_of(model)
    reported = clip_gradients(model, 0.1).item()
    return reported, norm_of(before), norm_of(gradients_of(model)), len(before)


MESHES = {"tp": 2, "shard": 2}, {"ring": 2, "replicate": 2}
DTYPES = torch.float64, torch.float32


def clipped_on(meshes: list[dict[str, int]]) -> list[list[tuple[float, float, float, int]]]:
    """Results of `clipped` in float64, and on the first mesh also in float32."""
    return [[clipped(axes, dtype) for dtype in (DTYPES if axes == meshes[0] else DTYPES[:1])] for axes in meshes]


def test_the_norm_is_over_full_gradients_and_clipping_reaches_the_limit(worlds):
    (((alone_64, alone_32),),) = worlds(1).run(clipped_on, [{}])
    ranks = worlds(4).run(clipped_on, list(MESHES))
    for i in range(len(MESHES)):
        for j, (alone, close) in enumerate(((alone_64, 1e-12), (alone_32, 1e-6))[: len(ranks[0][i])]):
            actual = [rank[i][j] for rank in ranks]
            assert len({reported for reported, *_ in actual}) == 1  # otherwise replicas of weights would diverge
            for reported, full, after, count in actual:
                assert reported == pytest.approx(full, rel=close)
                assert reported == pytest.approx(alone[0], rel=close)
                assert after == pytest.approx(0.1, rel=2e-5)  # torch adds 1e-6 to the norm
                assert count == alone[3] > 20
