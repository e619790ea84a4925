"""Blocks that save no input, or no attention output, recompute it from the blocks below, bitwise equal."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from armillary.attention import Local, UPipe, build_attention
from armillary.core.testing import mesh, relative_error
from armillary.models import (
    GPT,
    Checkpointing,
    GPTConfig,
    Llama,
    LlamaConfig,
    initialize,
    linear_token_loss,
    parallelize,
)
from armillary.models.activation_checkpoint import checkpoint
from armillary.models.activation_checkpoint.checkpoint import OnDevice
from armillary.models.activation_checkpoint.offload import OffloadedTensors
from armillary.models.activation_checkpoint.policy import peak_count, segment_sizes, tensors_by_block
from armillary.models.parts import Keep, best_input_count

LAYERS = 7
SIZES = {"vocab_size": 50, "dim": 32, "layers": LAYERS, "kv_heads": 2, "heads": 4, "hidden_dim": 48}
TOKENS = torch.arange(2 * 37).view(2, 37) % 50
LAYER, OUTPUT = Checkpointing("layer", chunk=16), Checkpointing("attention_output", chunk=16)


def build(options: Checkpointing, layers: int = LAYERS, attention=None) -> Llama:
    model = Llama(LlamaConfig(**SIZES | {"layers": layers}), Local() if attention is None else attention).double()
    initialize(model, 0)
    options.apply(model)
    return model


def gradients(model: Llama | GPT) -> list[Tensor]:
    loss = model(TOKENS, head=partial(linear_token_loss, labels=TOKENS.roll(1)))[0]
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


# -- saved tensors per block ------------------------------------------------------------------------------------------


def test_all_blocks_save_the_tensors_of_the_policy_by_default():
    assert LAYER.tensors_by_block(3) == (Keep(True, False, False),) * 3
    assert replace(OUTPUT, offload=True).tensors_by_block(3) == (Keep(True, True, True),) * 3
    assert replace(LAYER, inputs=3).tensors_by_block(3) == LAYER.tensors_by_block(3)
    actual = Checkpointing("attention_output", offload=True, inputs=4, outputs=3, on_device=2).tensors_by_block(6)
    assert [(k.x, k.attention_output, k.host) for k in actual] == [
        (True, False, True),
        (False, False, True),
        (True, False, True),
        (False, True, True),
        (True, True, False),
        (True, True, False),
    ]


def simulated_peak(layers: int, inputs: int, attention_passes: int) -> int:
    """Peak count of saved inputs and attention outputs, by simulating a step that recomputes segments from the top."""
    start, saved_count, peak, recomputed_count = (
        layers,
        inputs + attention_passes,
        inputs + attention_passes,
        layers - attention_passes,
    )
    for size in reversed(segment_sizes(layers, inputs, attention_passes)):
        start, end = start - size, start
        peak = max(peak, saved_count + max(0, size - 2) + sum(i < recomputed_count for i in range(start, end - 1)))
        saved_count -= 1 + sum(i >= recomputed_count for i in range(start, end))
    assert (start, saved_count) == (0, 0)
    return peak


@pytest.mark.parametrize("layers", [1, 2, 7, 32])
def test_segments_cover_all_blocks_with_the_lowest_peak(layers):
    for inputs, attention_passes in product(range(1, layers + 1), (0, layers // 2, layers)):
        sizes = segment_sizes(layers, inputs, attention_passes)
        assert len(sizes) == inputs and sum(sizes) == layers and min(sizes) >= 1
        spacing = ceil(layers / inputs)  # a plain plan: saves the input of every n-th block
        plain = inputs + attention_passes + max(0, spacing - 2) + min(spacing - 1, layers - attention_passes)
        peak = peak_count(layers, inputs, attention_passes)
        assert peak == simulated_peak(layers, inputs, attention_passes) and inputs + attention_passes <= peak <= plain


def test_peak_of_32_blocks_with_few_inputs():
    """Recomputed tensors fit into the memory freed by later blocks with 13 inputs or more if no attention output is
    saved, and with four if all are."""
    assert segment_sizes(32, 29, 0) == (1,) * 25 + (2, 2, 2, 1)
    assert [peak_count(32, inputs, 0) - inputs for inputs in range(32, 12, -1)] == [0] * 20
    assert best_input_count(32, 32) == 4 and peak_count(32, 4, 32) == 32 + 4


# -- gradients --------------------------------------------------------------------------------------------------------

OPTIONS = [
    *(
        replace(policy, inputs=inputs) for policy in (LAYER, OUTPUT) for inputs in (1, 3, 5)
    ),  # neither 3 nor 5 divides 7
    replace(OUTPUT, outputs=3),
    replace(OUTPUT, inputs=2, outputs=4),
    replace(LAYER, inputs=4, offload=True, on_device=2),
    replace(OUTPUT, inputs=3, outputs=5, offload=True, on_device=1, prefetch=False),
    replace(OUTPUT, offload=True, on_device=LAYERS),
]


@pytest.fixture(scope="module")
def staged() -> UPipe:
    return UPipe.for_method(Local(), 2)


@pytest.fixture(scope="module")
def with_every_input(staged) -> list[list[Tensor]]:
    """Gradients with every input saved: with one stage of heads, with several, and without checkpointing."""
    models = build(LAYER), build(LAYER, attention=staged), build(Checkpointing())
    return [gradients(model) for model in models]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o.policy}-{o.inputs}-{o.outputs}-{o.on_device}")
def test_losses_and_gradients_equal_those_with_every_input(options, staged, with_every_input):
    expected, expected_staged, plain = with_every_input
    assert same(gradients(build(options)), expected)
    assert same(gradients(build(options, attention=staged)), expected_staged)
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(expected, plain, strict=True))


def test_gpt_with_dropout_is_recomputed_equally():
    def step_gradients(options: Checkpointing) -> list[Tensor]:
        model = GPT(GPTConfig(vocab_size=50, dim=32, layers=4, heads=4, max_positions=64)).double()
        initialize(model, 0)
        for block in model.transformer.h:
            block.mlp = nn.Sequential(block.mlp, nn.Dropout(0.5))
        options.apply(model)
        torch.manual_seed(0)
        return gradients(model)

    assert same(step_gradients(replace(LAYER, inputs=1)), step_gradients(LAYER))


def attention_passes(options: Checkpointing, monkeypatch: pytest.MonkeyPatch) -> int:
    """Counts the forward passes of attention in a step."""
    calls, attend = Counter[str](), UPipe.attend
    monkeypatch.setattr(UPipe, "attend", lambda *args: calls.update(["attend"]) or attend(*args))
    gradients(build(options))
    monkeypatch.setattr(UPipe, "attend", attend)
    return calls["attend"]


@pytest.mark.parametrize("inputs", [None, 1, 4])
def test_attention_is_computed_no_more_often_than_with_every_input(inputs, monkeypatch):
    options = replace(OUTPUT, inputs=inputs)
    assert attention_passes(replace(LAYER, inputs=inputs), monkeypatch) == 2 * LAYERS
    assert attention_passes(options, monkeypatch) == LAYERS
    assert attention_passes(replace(options, outputs=5), monkeypatch) == 2 * LAYERS - 5


# -- saved tensors ----------------------------------------------------------------------------------------------------


def saved_shapes(options: Checkpointing) -> Counter[tuple[int, ...]]:
    """Counts shapes of the tensors that blocks save on the device, without parameters."""
    model, actual = build(options), dict[int, Tensor]()
    parameters = {p.data_ptr() for p in model.parameters()}
    with saved_tensors_hooks(lambda x: actual.setdefault(x.data_ptr(), x), lambda x: x):
        model(TOKENS)
    return Counter(tuple(x.shape) for x in actual.values() if x.data_ptr() not in parameters and x.ndim > 2)


def test_blocks_save_the_selected_tensors():
    x, out, lse = (2, 37, 32), (2, 37, 4, 8), (2, 37, 4)
    ends = saved_shapes(LAYER)[x] - LAYERS  # tensors saved by the norm after the blocks
    assert saved_shapes(replace(LAYER, inputs=3))[x] == 3 + ends
    actual = saved_shapes(replace(OUTPUT, inputs=2, outputs=4))
    assert (actual[x] - ends, actual[out], actual[lse]) == (2, 4, 4)
    assert saved_shapes(replace(OUTPUT, offload=True, inputs=5, outputs=4, on_device=2))[out] == 2


def test_recomputed_tensors_are_released_at_once(monkeypatch):
    """Each block frees its recomputed tensors; the graph would hold those of the whole step."""
    references = list[ref[Tensor]]()

    class RecordingOnDevice(OnDevice):
        def __init__(self, tensors):
            super().__init__(tensors)
            references.extend(map(ref, tensors))

    monkeypatch.setattr(checkpoint, "OnDevice", RecordingOnDevice)
    model, alive = build(replace(LAYER, inputs=2)), list[int]()
    model.model.layers[0].register_full_backward_hook(lambda *_: alive.append(sum(x() is not None for x in references)))
    loss = model(TOKENS, head=partial(linear_token_loss, labels=TOKENS.roll(1)))[0]
    loss.backward()
    assert len(references) == 3 * (LAYERS - 2) - 2 and alive[-1] == 0


def test_recomputed_tensors_are_only_on_the_host_before_a_block_is_differentiated(monkeypatch):
    finished = list[OffloadedTensors]()
    monkeypatch.setattr(OffloadedTensors, "finish_copy", lambda offloaded: finished.append(offloaded))
    gradients(build(replace(LAYER, inputs=2, offload=True)))
    assert len(finished) == LAYERS - 2


def test_an_input_changed_by_a_hook_is_saved():
    """Recomputing a block would not repeat a hook that changed its output, so the changed input is saved."""

    def step_gradients(options: Checkpointing) -> list[Tensor]:
        model = build(options)
        model.model.layers[2].register_forward_hook(lambda module, inputs, out: out * 1.5)
        model.model.layers[4].register_forward_hook(lambda module, inputs, out: out.add_(0.25))
        return gradients(model)

    assert same(step_gradients(replace(LAYER, inputs=1)), step_gradients(LAYER))


def test_a_retained_graph_can_be_differentiated_again():
    model = build(replace(OUTPUT, inputs=2, outputs=3, offload=True, on_device=1))
    loss = model(TOKENS, head=partial(linear_token_loss, labels=TOKENS.roll(1)))[0]
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    repeated = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, first, repeated))


@pytest.mark.parametrize("frozen", ["embed_tokens", "layers.3", "self_attn", "layers"])
def test_frozen_parameters_do_not_affect_other_gradients(frozen):
    def step_gradients(options: Checkpointing) -> list[Tensor]:
        model = build(options)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name and "embed_tokens" not in name)
        return gradients(model)

    assert same(step_gradients(replace(LAYER, inputs=2)), step_gradients(LAYER))


def test_part_of_a_model_can_be_differentiated():
    def step_gradients(options: Checkpointing) -> list[Tensor]:
        model, hidden = build(options), list[Tensor]()
        model.model.layers[3].register_forward_hook(lambda module, inputs, out: hidden.append(out))
        loss = model(TOKENS, head=F.linear).square().mean()
        return list(torch.autograd.grad(loss, hidden))

    assert same(step_gradients(replace(LAYER, inputs=1)), step_gradients(LAYER))


# -- on meshes --------------------------------------------------------------------------------------------------------


def on_mesh(axes: dict[str, int], name: str, several: list[Checkpointing]) -> list[bool]:
    """Returns whether the gradients of each option equal the first one's bitwise."""
    over, actual = mesh(**axes), list[list[Tensor]]()
    attend = build_attention(name, over)
    layout = attend.layout(64)
    ids = layout.take(torch.arange(128).view(2, 64) % 50, attend.shard)
    for options in several:
        with torch.device("meta"):
            model = Llama(LlamaConfig(**SIZES | {"layers": 4, "head_dim": 8}))
        parallelize(model, over, attention=attend, checkpointing=options, precision=torch.float64)
        model.to_empty(device="cpu")
        initialize(model, 0)
        total, _ = model(
            ids, positions=layout.positions(attend.shard), layout=layout, head=partial(linear_token_loss, labels=ids)
        )
        total.backward()
        actual.append([p.grad.to_local() for p in model.parameters()])
    return [same(each, actual[0]) for each in actual[1:]]


@pytest.mark.parametrize(("axes", "name"), [({"ring": 2, "ulysses": 2}, "usp"), ({"tp": 2, "ulysses": 2}, "upipe")])
def test_under_fsdp_and_tensor_parallelism_gradients_are_the_same(worlds, axes, name):
    several = [LAYER, replace(LAYER, inputs=1), replace(OUTPUT, inputs=2, outputs=3, offload=True, on_device=1)]
    for actual in worlds(4).run(on_mesh, axes, name, several):
        assert actual == [True, True]


def test_every_block_can_have_its_own_policy():
    assert [k.host for k in tensors_by_block(4, 4, 0, 3)] == [True, True, True, False]
    assert all(k.x for k in tensors_by_block(4, 4, 0, 1))
