"""Checkpoint policies change the saved tensors and leave losses and gradients alone."""

import itertools
from collections.abc import Iterable
from functools import cache, partial
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from hybrid_models import STATES
from latent_models import SIZES as LATENT_SIZES
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from armillary.attention import AttentionMask, Local, UPipe
from armillary.core.testing import relative_error
from armillary.models import Checkpointing, Llama, LlamaConfig, in_chunks, initialize, linear_token_loss
from armillary.models.block import Context
from armillary.models.internal import HeadProjections, Policy
from armillary.models.layers.rope import RotaryEmbedding
from armillary.models.layers.token_functions import TokenFunction

SIZES = {"vocab_size": 50, "dim": 32, "layers": 3, "kv_heads": 2, "heads": 4, "hidden_dim": 48}
TOKENS = torch.arange(2 * 37).view(2, 37) % 50

POLICIES = [
    Checkpointing("none", tiled=True, chunk=7),
    Checkpointing("layer"),
    Checkpointing("layer", chunk=8),
    Checkpointing("layer", offload=True, chunk=8),
    Checkpointing("layer", offload=True, prefetch=False),
    Checkpointing("attention_output", chunk=5),
    Checkpointing("attention_output", offload=True),
]


def build(options: Checkpointing, dtype: torch.dtype, stage: int | None = None, **config) -> Llama:
    model = Llama(LlamaConfig(**SIZES | config), Local() if stage is None else UPipe.for_method(Local(), stage)).to(
        dtype
    )
    initialize(model, 0)
    for i, parameter in enumerate(p for p in model.parameters() if p.ndim == 1):
        nn.init.normal_(parameter, 1.0, 0.3, generator=torch.Generator().manual_seed(i))
    options.apply(model)
    return model


def loss_of(model: Llama) -> Tensor:
    return model(TOKENS, head=partial(linear_token_loss, labels=TOKENS.roll(1)))[0]


def gradients(model: Llama) -> list[Tensor]:
    loss = loss_of(model)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def largest_error(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    return max(itertools.starmap(relative_error, zip(actual, expected, strict=True)))


CONFIGS = [
    {},
    {"qk_norm": True, "qkv_bias": True, "window": 4, "window_from": 1},
    {"tied_embeddings": True, "head_dim": 6},
    {"mixers": ("delta_rule", "mamba2", "attention"), "states": STATES},
    {"kv_heads": 4, "latent": LATENT_SIZES},
]


@cache
def gradients_without_checkpoints(config: int, dtype: torch.dtype) -> list[Tensor]:
    """Loss and gradients without checkpointing."""
    return gradients(build(Checkpointing(), dtype, **CONFIGS[config]))


@pytest.mark.parametrize("stage", [None, 2])
@pytest.mark.parametrize(("i", "options"), list(enumerate(POLICIES)), ids=str)
def test_losses_and_gradients_equal_those_without_checkpoints(i, options, stage):
    config = (i + (stage is None)) % len(CONFIGS)  # every policy and stage runs with every config somewhere
    exact = gradients_without_checkpoints(config, torch.float64)
    result = gradients(build(options, torch.float64, stage, **CONFIGS[config]))
    assert largest_error(result, exact) < 1e-12
    actual = gradients(build(options, torch.float32, stage, **CONFIGS[config]))
    plain, result = (
        [relative_error(x.double(), y) for x, y in zip(each, exact, strict=True)]
        for each in (gradients_without_checkpoints(config, torch.float32), actual)
    )
    # The gradient of a key bias cancels to nearly 0, so its relative error depends on the order of additions.
    assert all(error < max(1e-6, 2 * usual) for error, usual in zip(result, plain, strict=True))


@pytest.mark.parametrize("options", [POLICIES[0], POLICIES[3]], ids=str)
def test_bfloat16_gradients_are_as_exact_as_without_checkpoints(options):
    exact = gradients_without_checkpoints(0, torch.float64)
    plain, result = (gradients(build(o, torch.bfloat16, 2)) for o in (Checkpointing(), options))
    plain_error, error = (
        [relative_error(a.double(), b) for a, b in zip(actual, exact, strict=True)] for actual in (plain, result)
    )
    assert sum(error) < 1.2 * sum(plain_error)


@pytest.mark.parametrize(
    ("options", "inside"),
    [
        (Checkpointing(tiled=True), False),
        (Checkpointing("layer"), True),
        (Checkpointing("layer"), False),
        (Checkpointing("attention_output", offload=True), False),
    ],
    ids=str,
)
def test_under_autocast_blocks_are_recomputed_equally(options, inside):
    def step(checkpointing: Checkpointing) -> list[Tensor]:
        model = build(checkpointing, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    assert largest_error(step(options), step(Checkpointing())) < 2e-2


# -- frozen parameters, retained graphs, gradient buffers --------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "frozen"),
    [
        *(("layer", frozen) for frozen in ("embed_tokens", "self_attn", "mlp", "layernorm", "layers.1", "lm_head")),
        *(("attention_output", frozen) for frozen in ("self_attn", "mlp", "layernorm", "proj", "k_proj.bias")),
    ],
)
def test_only_frozen_parameters_get_no_gradient(frozen, policy):
    """Under `attention_output`, heads are computed in stages."""

    def step_gradients(options: Checkpointing, stage: int | None = None) -> dict[str, Tensor | None]:
        model = build(options, torch.float64, stage, qkv_bias=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        loss_of(model).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    result = step_gradients(Checkpointing(policy), 2 if policy == "attention_output" else None)
    for name, gradient in step_gradients(Checkpointing()).items():
        assert (result[name] is None) == (gradient is None) == (frozen in name), name
        # Gradients of key biases cancel to nearly 0.
        assert gradient is None or gradient.norm() < 1e-9 or relative_error(result[name], gradient) < 1e-12, name


def test_a_parameter_modified_between_forward_and_backward_raises():
    model = build(Checkpointing("layer"), torch.float64)
    loss = loss_of(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_with_other_references_are_not_overwritten():
    """Blocks accumulate gradients in place, except in tensors that a hook or the caller holds."""
    expected, result = [], []
    for options, gradients in ((Checkpointing(), expected), (Checkpointing("layer"), result)):
        model = build(options, torch.float64)
        hidden, hook_gradients = [], []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, inputs, out, hidden=hidden: hidden.append(out))
        loss = loss_of(model)
        hidden[0].register_hook(hook_gradients.append)
        hidden[1].retain_grad()
        gradients += torch.autograd.grad(loss, hidden, retain_graph=True)
        loss.backward()
        gradients += [*hook_gradients, hidden[1].grad]
    assert largest_error(result, expected) < 1e-12


def block_and_input(policy: str) -> tuple[nn.Module, Tensor, Context]:
    model = build(Checkpointing(policy), torch.float64, layers=1)
    x = torch.randn(2, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rotation = RotaryEmbedding.at(torch.arange(8), 8, 1e4, torch.float64)
    return model.model.layers[0], x, Context(x.shape[1], rotation, AttentionMask(), None)


def through_views(policy: str, view: str) -> list[Tensor]:
    """Gradients when the incoming gradient of a block is a view of a tensor with other references."""
    block, x, context = block_and_input(policy)
    y, other = block(x, context), torch.ones_like(x, requires_grad=True)
    gradient = torch.ones(16, 32, dtype=torch.float64)
    if view == "given":
        y.flatten(0, 1).backward(gradient)
        return [x.grad, gradient]
    if view == "asked for":
        flat = y.flatten(0, 1)
        return list(torch.autograd.grad((flat * flat.sin()).sum(), [flat, x]))
    ((y.flatten(0, 1) + other.tanh().flatten(0, 1)) ** 2).sum().backward()
    return [x.grad, other.grad]


@pytest.mark.parametrize("view", ["given", "asked for", "shared"])
@pytest.mark.parametrize("policy", ["layer", "attention_output"])
def test_gradients_that_are_views_of_referenced_tensors_are_not_overwritten(policy, view):
    assert largest_error(through_views(policy, view), through_views("none", view)) < 1e-12


@pytest.mark.parametrize("policy", ["layer", "attention_output"])
def test_a_parameter_that_is_only_added_gets_its_gradient(policy):
    def shift_gradient(policy: str) -> Tensor:
        block, x, _ = block_and_input(policy)
        context = Context(1, RotaryEmbedding.at(torch.arange(1), 8, 1e4, torch.float64), AttentionMask(), None)
        block.shift = nn.Parameter(torch.zeros(1, 1, 32, dtype=torch.float64))
        after_attention = block.after_attention
        block.after_attention = lambda x, out: after_attention(x, out) + block.shift
        (block(x[:1, :1].detach().requires_grad_(), context) ** 2).sum().backward()
        return block.shift.grad

    assert relative_error(shift_gradient(policy), shift_gradient("none")) < 1e-12


def test_nothing_is_offloaded_without_a_backward(monkeypatch):
    offloads = []
    monkeypatch.setattr(
        "armillary.models.activation_checkpoint.checkpointed_block.OffloadedTensors",
        lambda *args: offloads.append(args),
    )
    model = build(Checkpointing("layer", offload=True), torch.float32)
    with torch.no_grad():
        model(TOKENS)
    model.requires_grad_(False)
    model(TOKENS)
    assert not offloads


def test_a_shared_projection_accumulates_its_gradient_once():
    def gradients(stage: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        key_value, norm, query = nn.Linear(32, 16), nn.RMSNorm(8), nn.Linear(32, 32)
        projections = HeadProjections(query, key_value, key_value, 4, 2, 8, query_norm=norm, key_norm=norm)
        attend = Local() if stage is None else UPipe.for_method(Local(), stage)
        out = attend.projected(torch.randn(1, 9, 32), projections, mask=AttentionMask())
        out.square().sum().backward()
        return [key_value.weight.grad, norm.weight.grad]

    assert largest_error(gradients(2), gradients(None)) < 1e-5


class Adapted(nn.Module):
    """A linear layer with an added term, like LoRA."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.added = inner, nn.Linear(32, 32, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 2 * self.added(x)


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("stage", [None, 2])
@pytest.mark.parametrize("kind", ["parametrized", "adapted"])
def test_a_modified_projection_gets_its_gradients(kind, stage):
    def q_gradients(options: Checkpointing, stage: int | None) -> list[Tensor]:
        model = build(options, torch.float64, stage)
        attention = model.model.layers[0].self_attn
        torch.manual_seed(0)
        if kind == "adapted":
            attention.q_proj = Adapted(attention.q_proj)
        else:
            register_parametrization(attention.q_proj, "weight", Double())
        loss_of(model).backward()
        return [parameter.grad for parameter in attention.q_proj.parameters()]

    expected = q_gradients(Checkpointing(), None)
    for options in (POLICIES[0], POLICIES[2], POLICIES[5]):
        assert largest_error(q_gradients(options, stage), expected) < 1e-12, options


class PeakBytes(TorchDispatchMode):
    """Largest number of bytes of the storages alive at once, of those that ops inside of the mode have returned."""

    def __init__(self) -> None:
        super().__init__()
        self.storages, self.peak = dict[int, ref[torch.UntypedStorage]](), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.storages[x.untyped_storage()._cdata] = ref(x.untyped_storage())
        self.peak = max(self.peak, sum(s.nbytes() for x in self.storages.values() if (s := x()) is not None))
        return out


@pytest.mark.parametrize("head_dim", [4, 8, 16])
def test_forward_takes_no_more_memory_if_the_result_does_not_fit_into_out(head_dim):
    def peak(policy: Policy) -> int:
        model = build(Checkpointing(policy, chunk=8), torch.float32, layers=1, head_dim=head_dim)
        x, rotation = torch.randn(1, 256, 32), RotaryEmbedding.at(torch.arange(256), head_dim, 1e4, torch.float32)
        context = Context(256, rotation, AttentionMask(causal=True), None)
        with torch.no_grad(), PeakBytes() as memory:
            model.model.layers[0](x, context)
        return memory.peak

    assert peak("layer") <= peak("attention_output")


# -- token-wise functions ---------------------------------------------------------------------------------------------


def test_a_chunked_token_function_keeps_value_and_gradients():
    module = nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 4)).double()
    x, y = (torch.randn(2, 16, n, dtype=torch.float64, requires_grad=True) for n in (6, 4))
    function: TokenFunction = lambda x, y: module(x) * y.sin()  # noqa: E731
    expected, dout = [x, y, *module.parameters()], torch.randn(2, 16, 4, dtype=torch.float64)
    plain = function(x, y)
    exact = torch.autograd.grad(plain, expected, dout)
    for chunk in (1, 5, 100, None):
        chunks = in_chunks(function, (x, y), module, chunk)
        assert relative_error(chunks, plain) < 1e-14, chunk
        assert largest_error(torch.autograd.grad(chunks, expected, dout), exact) < 1e-13, chunk


def test_many_chunks_round_a_weights_gradient_once():
    """Summing the gradients of 512 chunks in bfloat16 would lose far more than one matrix multiplication does."""
    torch.manual_seed(0)
    linear = nn.Linear(16, 16, bias=False).bfloat16()
    x, dout = torch.randn(1, 512, 16).bfloat16() + 0.5, torch.randn(1, 512, 16).bfloat16() + 0.5
    exact = torch.einsum("bto,bti->oi", dout.double(), x.double())
    (result,) = torch.autograd.grad(in_chunks(linear, (x,), linear, chunk=1), linear.parameters(), dout)
    (unchunked,) = torch.autograd.grad(F.linear(x, linear.weight), linear.parameters(), dout)
    assert relative_error(result.double(), exact) < 1.1 * relative_error(unchunked.double(), exact)


@pytest.mark.parametrize("policy", ["layer", "attention_output"])
def test_blocks_are_recomputed_with_the_same_dropout(policy):
    def step(options: Checkpointing) -> list[Tensor]:
        model = build(options, torch.float64, layers=1)
        model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Dropout(0.5))
        torch.manual_seed(0)
        return gradients(model)

    assert largest_error(step(Checkpointing(policy)), step(Checkpointing())) < 1e-12


def test_recomputation_repeats_dropout():
    x = torch.randn(2, 16, 4, dtype=torch.float64, requires_grad=True)
    out = in_chunks(partial(F.dropout, p=0.5), (x,), nn.Identity(), chunk=3)
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(dx == 0, out == 0) and 0 < (out == 0).sum() < out.numel()
