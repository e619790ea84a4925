"""Checks of a projected call run once for equal layers and steps, and again after any relevant change."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrize import register_parametrization

from armillary.attention import AttentionMask, AttentionSpec, Local, Ring
from armillary.attention.call import validation
from armillary.core.testing import mesh
from armillary.models import Checkpointing, Llama, LlamaConfig, tensor_parallel
from armillary.models.internal import HeadProjections

CONFIG = LlamaConfig(vocab_size=16, dim=16, layers=3, heads=4, kv_heads=2, hidden_dim=16)
MASK = AttentionMask()


class Checks:
    """Counts the trial runs of projections that check their outputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.run = 0, validation.one_token
        monkeypatch.setattr(validation, "one_token", self)

    def __call__(self, x, projections):
        self.count += 1
        return self.run(x, projections)

    def new_checks(self) -> int:
        """Returns the number of checks since the previous call."""
        count, self.count = self.count, 0
        return count


@pytest.fixture
def checks(monkeypatch):
    return Checks(monkeypatch)


class Layer:
    """The projections of a model's layers, checked for one method."""

    def __init__(self, **options) -> None:
        self.model, self.attend = Llama(LlamaConfig(**vars(CONFIG) | options)), Local()
        self.x = torch.randn(2, 5, CONFIG.dim)

    def projections(self, layer: int = 0) -> HeadProjections:
        block, decoder = self.model.model.layers[layer], self.model.model
        return block.self_attn.projections(decoder.rotation(torch.arange(5), self.x.dtype), block.input_layernorm)

    def check(self, layer: int = 0, **options) -> AttentionSpec:
        return self.attend.check_projected(self.x, self.projections(layer), mask=MASK, **options)


@pytest.mark.parametrize("policy", ["none", "layer", "attention_output"])
def test_equal_layers_and_steps_are_checked_once(checks, policy):
    model, ids = Llama(CONFIG), torch.arange(10).view(2, 5)
    Checkpointing(policy).apply(model)
    for count in (1, 0):
        model(ids, mask=MASK).sum().backward()
        assert checks.new_checks() == count
    model(ids[:, :4], mask=MASK)
    model(ids, mask=AttentionMask(causal=False))
    assert checks.new_checks() == 2


def test_a_relevant_change_is_checked_again_and_specs_are_cached(checks):
    layer = Layer(qk_norm=True)
    plain = layer.check()
    assert plain is layer.check(1) is layer.check(2)
    assert checks.new_checks() == 1
    assert layer.check(scale=2.0) is layer.check(scale=2.0) is not plain
    assert checks.new_checks() == 1
    with torch.autocast("cpu", torch.bfloat16):
        low = layer.check()
        assert low is layer.check(1) is not plain
    with torch.autocast("cpu", torch.float16):
        assert layer.check() is not low
    assert checks.new_checks() == 2
    layer.model.bfloat16()
    with pytest.raises(RuntimeError, match="dtype"):  # x is still float32
        layer.check()
    layer.x = layer.x.bfloat16()
    assert layer.check() is not plain
    layer.model.model.layers[0].self_attn.q_norm.float()
    layer.check(1)
    assert checks.new_checks() == 2
    layer.check()
    assert checks.new_checks() == 1
    layer.model.float()
    layer.x = layer.x.float()
    assert layer.check() is plain
    assert not checks.new_checks()
    layer.check(sinks=torch.zeros(4))
    layer.check(sinks=torch.ones(4))
    assert checks.new_checks() == 1
    with pytest.raises(ValueError, match="sinks"):
        layer.check(sinks=torch.zeros(3))
    assert layer.check().kernel.name != "dense"
    layer.attend.kernel = "dense"
    assert layer.check().kernel.name == "dense"


class Adapter(nn.Module):
    """A linear layer with an added term, like LoRA."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.low, self.high = inner, nn.Linear(16, 2), nn.Linear(2, inner.out_features)

    def forward(self, x):
        return self.inner(x) + self.high(self.low(x))


class Scaled(torch.Tensor):
    """A weight of a tensor subclass, like float8 weights."""


CHANGES = {
    "adapter": lambda linear, attention: setattr(attention, "q_proj", Adapter(linear)),
    "hook": lambda linear, _: linear.register_forward_hook(lambda *_: None),
    "parametrization": lambda linear, _: register_parametrization(linear, "weight", nn.Identity()),
    "forward": lambda linear, _: setattr(linear, "forward", partial(nn.Linear.forward, linear)),
    "subclass": lambda linear, _: setattr(linear, "weight", nn.Parameter(linear.weight.detach().as_subclass(Scaled))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_modified_layers_are_checked_at_every_call(checks, change):
    layer = Layer()
    layer.check()
    attention = layer.model.model.layers[0].self_attn
    CHANGES[change](attention.q_proj, attention)
    assert checks.new_checks() == 1
    for _ in range(2):
        layer.check()
        assert checks.new_checks() == 1
    layer.check(1)
    assert not checks.new_checks()
    attention.k_proj = nn.Linear(12, 8)
    with pytest.raises(RuntimeError, match="shapes"):
        layer.check()


def checks_per_forward() -> list[int]:
    """Checks per forward: two forwards plain, two after tensor parallelism, two after FSDP2."""
    with pytest.MonkeyPatch.context() as patch:
        checks, counts = Checks(patch), []
        axes = mesh(ring=1, tp=2, shard=2)
        model, ids = Llama(CONFIG, Ring(axes["ring"])), torch.arange(10).view(2, 5)
        Checkpointing("layer").apply(model)

        def forward_twice() -> None:
            for _ in range(2):
                model(ids, mask=MASK)
                counts.append(checks.new_checks())

        forward_twice()
        tensor_parallel(model, axes["tp"])
        forward_twice()
        for block in model.model.layers:
            fully_shard(block, mesh=axes["shard"])
        forward_twice()
    return counts


def test_sharding_a_module_causes_one_more_check(worlds):
    assert worlds(4).run(checks_per_forward) == [[1, 0, 1, 0, 0, 0]] * 4
