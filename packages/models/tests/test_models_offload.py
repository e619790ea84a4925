"""Offloaded tensors on a stream of their own: stand-ins copy only when somebody waits for it."""

import gc
import itertools
from contextlib import nullcontext
from functools import partial
from weakref import ref

import pytest
import torch
from test_models_checkpoint import build, gradients, loss_of

from armillary.core.testing import relative_error
from armillary.models import Checkpointing
from armillary.models.activation_checkpoint import offload
from armillary.models.activation_checkpoint.offload import HostCopy, OffloadedTensors, SideStream


class LateSide:
    """A side stream on which nothing happens until it must, and which keeps no tensor of the device alive."""

    def __init__(self):
        self.queue, self.done, self.back = [], 0, 0
        self.latest_copy = lambda: None

    def start(self, copy):
        _, how, host, tensors = copy.func, *copy.args
        self.back += how is HostCopy.read
        self.queue.append((how, host[:], [ref(x) for x in tensors]))
        return partial(self.wait, len(self.queue))

    def wait(self, count):
        for how, host, tensors in self.queue[self.done : count]:
            for there, here in zip(host, tensors, strict=True):
                assert here() is not None, "its memory was given back while it was copied"
                how(there, here())
        self.done = max(self.done, count)

    @property
    def idle(self):
        return self.done == len(self.queue)


@pytest.fixture
def side(monkeypatch):
    """It; and memory that is not written to holds no numbers."""
    made, empty = LateSide(), torch.empty
    monkeypatch.setattr(offload, "side_stream", lambda device: made)
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: empty(*sizes, **options).fill_(torch.nan))
    return made


OFFLOADED = [
    Checkpointing(policy, offload=True, prefetch=prefetch)
    for policy in ("layer", "attention_output")
    for prefetch in (True, False)
]


@pytest.mark.parametrize("options", OFFLOADED)
def test_tensors_are_present_when_used_and_referenced_while_copied(side, options):
    result, expected = gradients(build(options, torch.float64)), gradients(build(Checkpointing(), torch.float64))
    assert max(itertools.starmap(relative_error, zip(result, expected, strict=True))) < 1e-12
    assert side.idle and len(side.queue) == 3 + 2 and side.back == 2  # the last block's are still here


@pytest.mark.parametrize("options", OFFLOADED)
def test_backward_again_and_in_another_order(side, options):
    """Of the whole model, of a block in between, and of the whole again."""

    def found(options):
        model, hidden = build(options, torch.float64), []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, inputs, out: hidden.append(out))
        loss, parameters = loss_of(model), [*model.model.layers[0].parameters()]
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        middle = torch.autograd.grad(hidden[1].square().sum(), parameters, retain_graph=True)
        lowest = torch.autograd.grad(hidden[0].square().sum(), parameters, retain_graph=True)
        return [*first, *middle, *lowest, *torch.autograd.grad(loss, parameters)]

    result, expected = found(options), found(Checkpointing())
    assert max(itertools.starmap(relative_error, zip(result, expected, strict=True))) < 1e-12
    gc.collect()
    assert side.idle


def test_deleted_transfers_are_waited_for(side):
    """A graph that nobody differentiates, and tensors that were fetched too early."""
    model = build(Checkpointing("layer", offload=True), torch.float64)
    loss = loss_of(model)
    assert not side.idle
    del loss
    gc.collect()
    assert side.idle
    offloaded = [OffloadedTensors([torch.rand(3)]) for _ in range(2)]
    offloaded[0].fetch()
    assert not side.idle
    offloaded.clear()
    gc.collect()
    assert side.idle


@pytest.mark.parametrize("simulated", [True, False])
def test_offloaded_tensors_are_referenced_until_the_next_block_is_done(simulated):
    """On a simulated stream as on a GPU; also where the next one keeps nothing on the host."""
    model = build(Checkpointing("attention_output", offload=True, on_device=1), torch.float64)
    inputs, alive = list[ref[torch.UntypedStorage]](), list[list[bool]]()

    def look(module, arguments):
        alive.append([x() is not None for x in inputs])
        inputs.append(ref(arguments[0].untyped_storage()))

    for layer in model.model.layers:
        layer.register_forward_pre_hook(look)
    with offload.simulated_stream() if simulated else nullcontext():
        loss = loss_of(model)
        assert alive == [[], [simulated], [False, simulated]]
        assert [x() is not None for x in inputs] == [False, False, True]
        loss.backward()
    assert all(x() is None for x in inputs)


class Stream:
    """Of CUDA's: what it was told, in order."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits until {event}")

    def record_event(self):
        return f"{self.name} is here"


def test_copies_and_compute_streams_wait_for_each_other(monkeypatch):
    log, current = [], []
    main, other = Stream("main", log), Stream("other", log)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])

    class Inside:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            current.append(self.stream)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch.cuda, "stream", Inside)
    side = SideStream(torch.device("cuda", 0))
    current.append(main)
    wait = side.start(lambda: log.append(f"copy on {current[-1].name}"))
    log.append("computed")
    current[:] = [other]
    wait()
    assert log[:3] == ["side waits for main", "copy on side", "computed"]
    assert sorted(log[3:]) == ["main waits until side is here", "other waits until side is here"]
