"""Checks of a projected call run once for equal layers and steps, and again after any relevant change."""

from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from armillary.attention import AttentionMask, AttentionSpec, Local, Ring
from armillary.attention.call import validation
from armillary.core.testing import mesh
from armillary.models import Checkpointing, Llama, LlamaConfig, tensor_parallel
from armillary.models.parts import HeadProjections

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


def test_specs_are_cached_and_shared(checks):
    layer = Layer()
    assert layer.check() is layer.check(1) is layer.check(2)
    assert checks.new_checks() == 1
    assert layer.check(scale=2.0) is not layer.check()
    assert layer.check(scale=2.0) is layer.check(scale=2.0)
    assert checks.new_checks() == 1


def test_weights_and_inputs_of_another_dtype_are_checked_again(checks):
    layer = Layer(qk_norm=True)
    before = layer.check()
    layer.model.bfloat16()
    with pytest.raises(RuntimeError, match="dtype"):  # x is still float32
        layer.check()
    layer.x = layer.x.bfloat16()
    assert layer.check() is not before
    attention = layer.model.model.layers[0].self_attn
    attention.q_norm.float()
    layer.check(1)
    assert checks.new_checks() == 3
    layer.check()
    assert checks.new_checks() == 1
    layer.model.float()
    layer.x = layer.x.float()
    assert layer.check() is before
    assert not checks.new_checks()


def test_autocast_is_checked_again(checks):
    layer = Layer()
    plain = layer.check()
    with torch.autocast("cpu", torch.bfloat16):
        low = layer.check()
        assert low is layer.check(1) is not plain
    with torch.autocast("cpu", torch.float16):
        assert layer.check() is not low
    assert checks.new_checks() == 3
    assert layer.check() is plain
    assert not checks.new_checks()


def test_resized_weights_are_refused_after_a_valid_call():
    layer = Layer()
    layer.check()
    layer.model.model.layers[0].self_attn.k_proj = nn.Linear(12, 8)
    with pytest.raises(RuntimeError, match="shapes"):
        layer.check()
    layer.check(1)


class Adapter(nn.Module):
    """A linear layer with an added term, like LoRA."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.low, self.high = inner, nn.Linear(16, 2), nn.Linear(2, inner.out_features)

    def forward(self, x):
        return self.inner(x) + self.high(self.low(x))


def adapt(linear: nn.Linear, attention: nn.Module) -> None:
    attention.q_proj = Adapter(linear)


def hook(linear: nn.Linear, attention: nn.Module) -> None:
    linear.register_forward_hook(lambda *_: None)


def parametrize(linear: nn.Linear, attention: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(linear, "weight", nn.Identity())


def override(linear: nn.Linear, attention: nn.Module) -> None:
    linear.forward = partial(nn.Linear.forward, linear)


class Scaled(torch.Tensor):
    """A weight of a tensor subclass, like float8 weights."""


def wrap(linear: nn.Linear, attention: nn.Module) -> None:
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Scaled))


@pytest.mark.parametrize("change", [adapt, hook, parametrize, override, wrap])
def test_modified_layers_are_checked_at_every_call(checks, change):
    layer = Layer()
    layer.check()
    attention = layer.model.model.layers[0].self_attn
    change(attention.q_proj, attention)
    assert checks.new_checks() == 1
    for _ in range(2):
        layer.check()
        assert checks.new_checks() == 1
    layer.check(1)
    assert not checks.new_checks()


def test_sinks_are_checked_again(checks):
    layer = Layer()
    layer.check()
    layer.check(sinks=torch.zeros(4))
    layer.check(sinks=torch.ones(4))
    assert checks.new_checks() == 2
    with pytest.raises(ValueError, match="sinks"):
        layer.check(sinks=torch.zeros(3))


def test_another_kernel_of_the_method_is_used(checks):
    layer = Layer()
    assert layer.check().kernel.name != "dense"
    layer.attend.kernel = "dense"
    assert layer.check().kernel.name == "dense"
    assert checks.new_checks() == 2


def test_symbolic_sizes_are_checked_at_every_call(checks):
    layer = Layer()
    with enable_python_dispatcher(), FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as fakes:
        layer.x = fakes.from_tensor(layer.x, static_shapes=False)
        for _ in range(2):
            layer.check()
    assert checks.new_checks() == 2


class CustomProjections:
    """User-defined projections without a cache key."""

    heads, key_heads = 2, 2
    empty: ClassVar[list[torch.Tensor]] = []

    def q(self, x, heads):
        return x[..., :8].unflatten(-1, (2, 4))[:, :, heads]

    def kv(self, x, heads):
        return self.q(x, heads), self.q(x, heads)

    def parameters(self):
        return self.empty


def test_projections_without_a_key_are_checked_at_every_call(checks):
    layer = Layer()
    for _ in range(2):
        layer.attend.check_projected(layer.x, CustomProjections(), mask=MASK)
    assert checks.new_checks() == 2


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
