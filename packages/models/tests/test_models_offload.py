"""Offloading on a side stream, with a stand-in stream that copies only when it is waited for."""

import gc
from contextlib import nullcontext
from functools import partial
from weakref import ref

import pytest
import torch
from test_models_checkpoint import build, gradients, largest_error, loss_of

from armillary.models import Checkpointing
from armillary.models.activation_checkpoint import offload
from armillary.models.activation_checkpoint.offload import HostCopy, OffloadedTensors, SideStream


class LateSide:
    """A side stream that runs each copy as late as possible and holds no reference to device tensors."""

    def __init__(self):
        self.queue, self.done, self.copies_to_device = [], 0, 0
        self.latest_copy = lambda: None

    def start(self, copy):
        _, copy_tensor, host, tensors = copy.func, *copy.args
        self.copies_to_device += copy_tensor is HostCopy.read
        self.queue.append((copy_tensor, host[:], [ref(x) for x in tensors]))
        return partial(self.wait, len(self.queue))

    def wait(self, count):
        for copy_tensor, host, tensors in self.queue[self.done : count]:
            for host_tensor, device_tensor in zip(host, tensors, strict=True):
                assert device_tensor() is not None, "the device tensor was freed during its copy"
                copy_tensor(host_tensor, device_tensor())
        self.done = max(self.done, count)

    @property
    def idle(self):
        return self.done == len(self.queue)


@pytest.fixture
def side(monkeypatch):
    """Installs a `LateSide`, and fills new memory with NaN so that missing copies show."""
    stream, empty = LateSide(), torch.empty
    monkeypatch.setattr(offload, "side_stream", lambda device: stream)
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: empty(*sizes, **options).fill_(torch.nan))
    return stream


OFFLOADED = [
    Checkpointing(policy, offload=True, prefetch=prefetch)
    for policy in ("layer", "attention_output")
    for prefetch in (True, False)
]


@pytest.mark.parametrize("options", OFFLOADED)
def test_tensors_are_present_when_used_and_referenced_while_copied(side, options):
    result, expected = gradients(build(options, torch.float64)), gradients(build(Checkpointing(), torch.float64))
    assert largest_error(result, expected) < 1e-12
    assert (
        side.idle and len(side.queue) == 3 + 2 and side.copies_to_device == 2
    )  # the last block's tensors are still on the device


@pytest.mark.parametrize("options", [OFFLOADED[0], OFFLOADED[3]])
def test_repeated_and_partial_backward(side, options):
    """Backward of the model, of blocks in between, and of the model again."""

    def gradients_of_backwards(options):
        model, hidden = build(options, torch.float64), []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, inputs, out: hidden.append(out))
        loss, parameters = loss_of(model), [*model.model.layers[0].parameters()]
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        middle = torch.autograd.grad(hidden[1].square().sum(), parameters, retain_graph=True)
        lowest = torch.autograd.grad(hidden[0].square().sum(), parameters, retain_graph=True)
        return [*first, *middle, *lowest, *torch.autograd.grad(loss, parameters)]

    result, expected = gradients_of_backwards(options), gradients_of_backwards(Checkpointing())
    assert largest_error(result, expected) < 1e-12
    gc.collect()
    assert side.idle


def test_deleting_tensors_waits_for_their_copies(side):
    """Deleting a graph without backward, and tensors after an early fetch, waits for their copies."""
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
    """Holds for simulated streams, and when the next block offloads nothing."""
    model = build(Checkpointing("attention_output", offload=True, on_device=1), torch.float64)
    inputs, alive = list[ref[torch.UntypedStorage]](), list[list[bool]]()

    def record_alive(module, arguments):
        alive.append([x() is not None for x in inputs])
        inputs.append(ref(arguments[0].untyped_storage()))

    for layer in model.model.layers:
        layer.register_forward_pre_hook(record_alive)
    with offload.simulated_stream() if simulated else nullcontext():
        loss = loss_of(model)
        assert alive == [[], [simulated], [False, simulated]]
        assert [x() is not None for x in inputs] == [False, False, True]
        loss.backward()
    assert all(x() is None for x in inputs)


class Stream:
    """A CUDA stream that logs its calls."""

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
