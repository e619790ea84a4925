"""Models on meshes: loss, gradients and weights after a step are those of the plain model on one rank."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.attention import AttentionMask, build_attention
from armillary.core import Axis, compat
from armillary.core.testing import mesh, relative_error
from armillary.models import GPT, Checkpointing, GPTConfig, Llama, LlamaConfig, initialize, linear_token_loss
from armillary.models.parallel import parallelize

LLAMA = LlamaConfig(vocab_size=37, dim=32, layers=2, heads=8, kv_heads=4, hidden_dim=48, head_dim=8, qk_norm=True)
TIED = replace(LLAMA, tied_embeddings=True, qkv_bias=True, qk_norm=False, vocab_size=40)
LEARNED = GPTConfig(vocab_size=38, dim=32, layers=2, heads=8, max_positions=64)
MASK = AttentionMask(documents=[0, 9, 64])
ROWS, N = 4, 64


@dataclass(frozen=True)
class Case:
    """A model on a mesh."""

    axes: Mapping[str, int]
    attention: str
    config: LlamaConfig | GPTConfig = LLAMA
    checkpointing: Checkpointing | None = None
    compiled: bool = False
    z_loss: float = 0.0

    def __str__(self) -> str:
        axes = "-".join(f"{name}{size}" for name, size in self.axes.items())
        policy = "" if self.checkpointing is None else f"-{self.checkpointing.policy}"
        kind = {id(LLAMA): "llama", id(TIED): "tied", id(LEARNED): "gpt"}[id(self.config)]
        return f"{kind}-{axes}-{self.attention}{policy}{'-compiled' if self.compiled else ''}"


def build(config: LlamaConfig | GPTConfig) -> Llama | GPT:
    return Llama(config) if isinstance(config, LlamaConfig) else GPT(config)


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(37, (ROWS, N), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[1, :20] = -100
    return ids, labels


def step(model: Llama | GPT, loss: Tensor) -> dict[str, Tensor]:
    """Gradients, and weights after a step."""
    loss.backward()
    found = {f"{name}'": whole(p.grad) for name, p in model.named_parameters()}
    torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True).step()
    return {**found, **{name: whole(p) for name, p in model.named_parameters()}}


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def on_one_rank(config: LlamaConfig | GPTConfig, z_loss: float) -> dict[str, Tensor]:
    model = build(config)
    initialize(model, 0)
    ids, labels = rows()
    total, count = model(ids, mask=MASK, head=partial(linear_token_loss, labels=labels, z_loss=z_loss))
    return {"logits": model(ids, mask=MASK).detach(), "loss": (total / count).detach(), **step(model, total / count)}


def on_mesh(case: Case) -> dict[str, float]:
    """The relative error of everything."""
    over = mesh(**case.axes)
    expected = on_one_rank(case.config, case.z_loss)
    attend = build_attention(case.attention, over)
    with torch.device("meta"):
        model = build(case.config)
    parallelize(model, over, attention=attend, checkpointing=case.checkpointing, compiled=case.compiled)
    model.to_empty(device="cpu")
    initialize(model, 0)
    layout = attend.layout(N)
    replicas = case.axes.get("replicate", 1) * case.axes.get("shard", 1)
    replica = over["replicate"].get_local_rank() * over["shard"].size() + over["shard"].get_local_rank()
    share = slice(replica * ROWS // replicas, (replica + 1) * ROWS // replicas)
    ids, labels = (layout.take(x[share], attend.shard) for x in rows())
    call = partial(model, ids, positions=layout.positions(attend.shard), mask=MASK, layout=layout)
    found = {"logits": call().detach()}
    total, count = call(head=partial(linear_token_loss, labels=labels, z_loss=case.z_loss))
    data = Axis.of(compat.flatten(over, ("replicate", "shard", "ring", "ulysses"), "data"))
    dist.all_reduce(count, group=data.group)
    loss = (total / count).detach().clone()
    dist.all_reduce(loss, group=data.group)
    found |= {"loss": loss, **step(model, total / count)}
    expected["logits"] = layout.take(expected["logits"][share], attend.shard)
    assert found.keys() == expected.keys()
    return {name: relative_error(found[name], expected[name]) for name in expected}


def check(case: Case, ranks: list[dict[str, float]]) -> None:
    worst = max((error, name) for rank in ranks for name, error in rank.items())
    assert worst[0] < 1e-5, (str(case), worst)


KEEP = Checkpointing("attention_output", piece=3)
LAYER = Checkpointing("layer")
CASES = [
    Case({"tp": 2, "ring": 2, "ulysses": 2}, "usp"),
    Case({"tp": 2, "ring": 2, "ulysses": 2}, "upipe+ring", TIED, KEEP, z_loss=1e-2),
    Case({"tp": 4, "ulysses": 2}, "ulysses", checkpointing=LAYER),
    Case({"tp": 2, "ring": 4}, "wallfacer", LEARNED, KEEP),
    Case({"tp": 2, "shard": 2, "ring": 2}, "ring", TIED),
    Case({"tp": 2, "shard": 2, "ring": 2}, "token_ring", LEARNED),
    Case({"tp": 2, "replicate": 2, "ring": 2}, "ring"),
    Case({"replicate": 2, "shard": 2, "ulysses": 2}, "ulysses", LEARNED),
    Case({"replicate": 2, "shard": 2, "ulysses": 2}, "upipe", checkpointing=LAYER),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_gradients_and_a_step_are_those_of_one_rank(worlds, case):
    check(case, worlds(8).run(on_mesh, case, timeout=300))
