"""Blocks that save no input, or no attention output, recompute it from the blocks below, bitwise equal."""

from collections import Counter
from dataclasses import replace
from itertools import product
from math import ceil
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from test_models_checkpoint import TOKENS, gradients, loss_of
from test_models_checkpoint import build as build_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from armillary.attention import UPipe
from armillary.models import GPT, Checkpointing, GPTConfig, Llama, initialize
from armillary.models.activation_checkpoint import checkpointed_block
from armillary.models.activation_checkpoint.checkpointed_block import OnDevice
from armillary.models.activation_checkpoint.offload import OffloadedTensors
from armillary.models.activation_checkpoint.policy import peak_count, segment_sizes
from armillary.models.internal import best_input_count

LAYERS = 7
LAYER, OUTPUT = Checkpointing("layer", chunk=16), Checkpointing("attention_output", chunk=16)


def build(options: Checkpointing, stage: int | None = None) -> Llama:
    return build_model(options, torch.float64, stage, layers=LAYERS)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


# -- saved tensors per block ------------------------------------------------------------------------------------------


def test_blocks_alternate_between_the_selected_tensors():
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

OPTIONS = {  # by the heads of a stage
    None: [
        replace(LAYER, inputs=1),
        replace(OUTPUT, inputs=2, outputs=4),
        replace(LAYER, inputs=4, offload=True, on_device=2),
        replace(OUTPUT, offload=True, on_device=LAYERS),
    ],
    2: [
        replace(LAYER, inputs=3),  # which does not divide 7
        replace(OUTPUT, inputs=1),
        replace(OUTPUT, inputs=3, outputs=5, offload=True, on_device=1, prefetch=False),
    ],
}


@pytest.mark.parametrize("stage", OPTIONS)
def test_losses_and_gradients_equal_those_with_every_input(stage):
    expected = gradients(build(LAYER, stage))
    for options in OPTIONS[stage]:
        assert same(gradients(build(options, stage)), expected), options


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


@pytest.mark.parametrize("inputs", [None, 1])
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
    outside = saved_shapes(replace(LAYER, offload=True))  # tensors saved by the norm after the blocks

    def of_blocks(options: Checkpointing) -> dict[tuple[int, ...], int]:
        return dict(saved_shapes(options) - outside)

    assert of_blocks(LAYER) == {x: LAYERS}
    assert of_blocks(OUTPUT) == {x: LAYERS, out: LAYERS, lse: LAYERS}
    assert of_blocks(replace(LAYER, inputs=3)) == {x: 3}
    assert of_blocks(replace(OUTPUT, inputs=2, outputs=4)) == {x: 2, out: 4, lse: 4}
    assert of_blocks(replace(OUTPUT, offload=True, inputs=5, outputs=4, on_device=2)) == {x: 2, out: 2, lse: 2}


def test_recomputed_tensors_are_released_at_once(monkeypatch):
    """Each block frees its recomputed tensors; the graph would hold those of the whole step."""
    references = list[ref[Tensor]]()

    class RecordingOnDevice(OnDevice):
        def __init__(self, tensors):
            super().__init__(tensors)
            references.extend(map(ref, tensors))

    monkeypatch.setattr(checkpointed_block, "OnDevice", RecordingOnDevice)
    model, alive = build(replace(LAYER, inputs=2)), list[int]()
    model.model.layers[0].register_full_backward_hook(lambda *_: alive.append(sum(x() is not None for x in references)))
    loss = loss_of(model)
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


@pytest.mark.parametrize(
    "options", [LAYER, replace(OUTPUT, inputs=2, outputs=3, offload=True, on_device=1)], ids=["all inputs", "fewer"]
)
def test_a_retained_graph_can_be_differentiated_again(options):
    model = build(options)
    loss = loss_of(model)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    repeated = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, first, repeated))


@pytest.mark.parametrize("frozen", ["layers.3", "layers"])
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
