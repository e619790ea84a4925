"""Missing ranks of a hung run, stacks of waiting ranks, and signals."""

import ctypes
import linecache
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from armillary.core.internal import compat
from armillary.core.testing import World, fork_context
from armillary.train import hang_diagnosis
from armillary.train.checkpoint.checkpoints import Background
from armillary.train.hang_diagnosis import (
    HEARTBEATS,
    Calls,
    Heartbeat,
    Heartbeats,
    communicates,
    current_stack,
    joined_thread,
    location_of,
    missing_ranks,
    recorded_calls,
    waits,
)
from armillary.train.internal import caused_by_peers
from armillary.train.logs import GuardedSink, Sink
from armillary.train.stop_signal import REPEAT, StopSignal

WAITING = Heartbeat(
    7, "training", location="step.py:60 in summed", waits=True, calls={"0": Calls(12, "gloo:all_reduce", True)}
)


@pytest.mark.parametrize(
    ("beat", "silent", "values"),
    [
        (None, set(), ["never"]),
        (Heartbeat(5, "saving"), {2}, ["step 5 (saving)"]),
        (Heartbeat(7, "training", failure="KeyError: 'x'"), set(), ["step 7", "KeyError: 'x'"]),
        (replace(WAITING, waits=False, location="rows.py:3 in read"), set(), ["step 7", "rows.py:3 in read"]),
        (
            replace(WAITING, calls={"0": Calls(11, "gloo:broadcast", True)}),
            set(),
            ["11", "group 0", "12", "step.py:60"],
        ),
    ],
    ids=["no heartbeat", "silent", "failed", "elsewhere", "behind"],
)
def test_the_missing_rank_is_named_with_the_reason(beat, silent, values):
    beats = {0: WAITING, 1: WAITING, 2: beat, 3: WAITING}
    missing = missing_ranks(beats, silent)
    assert list(missing) == [2] and all(value in missing[2] for value in values)
    assert beat is None or HEARTBEATS.validate_json(HEARTBEATS.dump_json(beat)) == beat


def test_no_rank_is_missing_unless_one_waits_in_a_collective_that_another_has_not_called():
    complete = replace(WAITING, calls={"0": Calls(12, "gloo:broadcast", False), "1": Calls(3, "gloo:all_reduce", True)})
    behind = replace(complete, calls={**complete.calls, "0": Calls(11, "gloo:broadcast", True)})
    sender, other = (replace(WAITING, calls={"0": replace(WAITING.calls["0"], messages=n)}) for n in (3, 5))
    for beats in ({0: WAITING, 1: WAITING}, {0: complete, 1: behind}, {0: other, 1: sender}):  # messages do not count
        assert missing_ranks(beats, set()) == {}


def diagnoses_around_a_stop() -> dict[int, str]:
    """Returns the missing ranks that each rank names. Rank 1 is stopped until rank 0 has diagnosed it, and ended."""
    hang_diagnosis.SILENCE = 0.2
    rank, world = dist.get_rank(), compat.default_store().clone()
    heartbeats = Heartbeats(rank, 2)
    heartbeats._store = dist.PrefixStore("diagnoses around a stop", world)
    heartbeats.post(replace(WAITING, location=None))
    if rank == 1:
        world.wait(["rank 0 has ended"])
    heartbeats.post(WAITING)
    missing = heartbeats.diagnose()[1]
    world.set("rank 0 has ended", "")
    return missing


def test_a_rank_that_wakes_after_the_others_have_ended_names_the_same_missing_ranks():
    with World(2) as world:  # of their own: the ranks keep the short time
        first, second = world.run(diagnoses_around_a_stop)
    assert first == second and list(first) == [1] and "no heartbeat since step 7" in first[1]


def entry(operation: str, collectives: int, messages: int = 0, retired: bool = True) -> dict[str, Any]:
    counts = {"collective_seq_id": collectives, "p2p_seq_id": messages, "is_p2p": "->" in operation}
    return {"process_group": ["0", "ring"], "profiling_name": operation, "retired": retired, **counts}


def test_calls_are_counted_by_group_and_backend(monkeypatch):
    """A group has a backend for host tensors and one for device tensors; both count from 1."""
    entries = [entry("gloo:all_reduce", 1), entry("gloo:barrier", 2, retired=False)]
    entries += [entry("nccl2:all_gather", 40), entry("nccl2:send 0->1", 40, 7, retired=False)]
    entries += [entry("nccl2:recv 0<-1", 40, 8)]
    monkeypatch.setattr(hang_diagnosis, "recorded_collectives", lambda: entries)
    assert recorded_calls() == {
        "0 (gloo)": Calls(2, "gloo:barrier", True),
        "0 (nccl2)": Calls(40, "nccl2:recv 0<-1", True, messages=8),
    }


def errors_caused_by_peers() -> list[bool]:
    """Returns `caused_by_peers` for errors of collectives that rank 1 skips (on rank 0), and for local errors."""
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    sums = DTensor.from_local(torch.ones(2), DeviceMesh.from_group(group, "cpu"), [Partial()], run_check=False)
    collective_errors = (lambda: dist.barrier(group), lambda: sums.full_tensor())
    local_errors = (
        lambda: torch.ones(2) + torch.ones(3),
        lambda: sums + DTensor.from_local(torch.ones(3), sums.device_mesh),
    )
    return [
        caused_by_peers(error_of(action))
        for action in (*(collective_errors if dist.get_rank() == 0 else ()), *local_errors)
    ]


def error_of(action: Callable[[], object]) -> RuntimeError:
    with pytest.raises(RuntimeError) as failure:
        action()
    return failure.value


def test_errors_of_communication_are_caused_by_peers(worlds):
    """Also for a DTensor, where several torch functions lie between the wait and the error."""
    assert worlds(2).run(errors_caused_by_peers) == [[True, True, False, False], [False, False]]


def test_errors_of_this_ranks_device_are_not_caused_by_peers():
    """A collective raises an illegal memory access of an earlier kernel, and may itself run out of memory."""
    assert not caused_by_peers(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert not caused_by_peers(
        dist.DistBackendError("ncclUnhandledCudaError: Call failed. Cuda failure 'out of memory'")
    )
    assert caused_by_peers(ConnectionError("lost a peer")) and caused_by_peers(TimeoutError("timed out"))


def test_a_signal_is_received_in_the_main_thread_and_the_earlier_handler_restored():
    before, received = signal.getsignal(signal.SIGTERM), []

    def receive() -> None:
        with StopSignal() as stop:
            if threading.current_thread() is threading.main_thread():
                os.kill(os.getpid(), signal.SIGTERM)
            received.append(stop.received)

    receive()
    thread = threading.Thread(target=receive)
    thread.start()
    thread.join()
    assert received == [True, False] and signal.getsignal(signal.SIGTERM) is before


def block_in_c() -> None:
    """Blocks the main thread in C, where no signal handler of Python runs, as a wait for a collective does."""
    with StopSignal():
        mutex, lock = ctypes.create_string_buffer(256), ctypes.CDLL(None).pthread_mutex_lock
        lock(mutex)
        Path("blocked").touch()
        lock(mutex)


def test_a_second_signal_ends_a_blocked_process_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = fork_context().Process(target=run_in, args=(tmp_path, block_in_c))
    process.start()
    while not Path("blocked").exists():
        assert process.is_alive()
        time.sleep(0.01)
    # As from the scheduler and from torchrun; of two kinds, because equal signals that wait become one.
    for number in StopSignal.SIGNALS:
        os.kill(process.pid, number)
    process.join(REPEAT / 2)
    assert process.exitcode is None
    end = time.monotonic() + 60
    while process.is_alive() and time.monotonic() < end:
        os.kill(process.pid, signal.SIGUSR1)
        process.join(REPEAT / 2)
    process.kill()
    assert process.exitcode == 128 + signal.SIGUSR1
    assert re.search("armillary-train: .*SIGUSR1.*without saving", Path("stderr").read_text())


def run_in(folder: Path, action: Callable[[], None]) -> None:
    os.chdir(folder)
    os.environ.pop("TORCHELASTIC_ERROR_FILE", None)
    with Path("stderr").open("w") as sys.stderr:
        action()


class Observer:
    """Stops a thread in `block` until another thread has seen the stack on which the main thread depends."""

    def __init__(self) -> None:
        self.lock, self.stack = threading.Lock(), StackSummary()
        self.lock.acquire()

    def block(self) -> None:
        with self.lock:
            pass

    def observe(self, is_ready: Callable[[FrameType, StackSummary], object]) -> None:
        """Waits until the main thread's frame and the current stack are as expected, and lets `block` return."""
        ident = threading.main_thread().ident
        while True:
            frame, self.stack = sys._current_frames()[ident], current_stack()
            if is_ready(frame, self.stack):
                break
            time.sleep(0.01)
        self.lock.release()


def test_waits_are_shown_by_the_caller_of_the_standard_library_and_the_line_of_a_joined_thread():
    observer = Observer()
    with ThreadPoolExecutor(2) as pool:
        blocked = pool.submit(observer.block)
        pool.submit(observer.observe, lambda frame, _: frame.f_back.f_code.co_name == "result")
        blocked.result()
    assert re.fullmatch(r"test_health\.py:\d+ in test_waits_are_shown_by_the_caller.*", location_of(observer.stack))
    observer = Observer()
    saving = threading.Thread(target=observer.block)
    observing = threading.Thread(target=observer.observe, args=(lambda frame, _: joined_thread(frame),))
    saving.start()
    observing.start()
    saving.join()
    observing.join()
    assert re.fullmatch(r"test_health\.py:\d+ in block", location_of(observer.stack))


def waits_while_joining_a_save() -> bool:
    """Returns whether rank 0 counts as waiting for peers while its main thread joins a thread in a collective."""
    group = dist.new_group(timeout=timedelta(seconds=30))
    store, observed = compat.default_store().clone(), threading.Event()

    def observe() -> None:
        ident = threading.main_thread().ident
        while joined_thread(sys._current_frames()[ident]) is None or not waits(current_stack()):
            time.sleep(0.01)
        observed.set()
        store.set("joins a save", "")

    if dist.get_rank() == 0:
        observing = threading.Thread(target=observe)
        saving = threading.Thread(target=dist.barrier, args=(group,))
        saving.start()
        observing.start()
        saving.join()
        observing.join()
    else:
        store.wait(["joins a save"])
        dist.barrier(group)
    return observed.is_set()


def test_a_rank_that_joins_a_thread_in_a_collective_waits_for_peers(worlds):
    assert worlds(2).run(waits_while_joining_a_save) == [True, False]


class BlockingRead:
    """A tensor whose reads block until the lock is free. They are builtin functions, so they have no frame."""

    def __init__(self, lock: threading.Lock) -> None:
        self.item = self.tolist = self.synchronize = lock.acquire
        self.append = lock.acquire

    def itself(self) -> "BlockingRead":
        return self


def stack_while_blocked(action: Callable[[BlockingRead], object]) -> StackSummary:
    """Returns the stack of the main thread while `action` blocks it."""
    observer = Observer()

    def blocked(_: FrameType, stack: StackSummary) -> object:
        line = stack[-1]
        return line.name == action.__name__ and re.search(r"\.(item|tolist|synchronize|append)\(", line.line or "")

    observing = Background("observer", lambda: observer.observe(blocked))
    action(BlockingRead(observer.lock))
    observing.join()
    observing.raise_error()
    return observer.stack


def read_item(loss: BlockingRead) -> float:
    return float(len([loss.itself().item()]))


def read_list(loss: BlockingRead) -> list[object]:
    return [
        loss.itself()
        .tolist()
    ]  # fmt: skip


def synchronize(stream: BlockingRead) -> None:
    stream.synchronize()


def append(rows: BlockingRead) -> None:
    rows.append()


@pytest.mark.parametrize(
    ("action", "expected"), [(read_item, True), (read_list, True), (synchronize, True), (append, False)]
)
def test_a_blocking_read_of_the_device_waits_for_peers(action, expected):
    """The host runs ahead of NCCL, so it waits for peers in the next `loss.item()`."""
    stack = stack_while_blocked(action)
    assert waits(stack) == expected and not communicates(stack)


def test_a_dtensor_read_waits_below_functions_of_torch(monkeypatch):
    source = "loss = run(total.full().item())\n"
    monkeypatch.setattr(linecache, "getline", lambda file, number: source if file == "/train/step.py" else "")
    step = FrameSummary("/train/step.py", 1, "train_step", lookup_line=False)
    dispatch = FrameSummary("/torch/distributed/tensor/_dispatch.py", 1, "dispatch", lookup_line=False)
    assert waits(StackSummary.from_list([step, dispatch]))
    assert not waits(StackSummary.from_list([step, FrameSummary("/data/rows.py", 1, "read", lookup_line=False)]))


DEPTH = 61
"""Number of nested backward passes from which torch continues in an autograd thread, as it always does on CUDA."""


class NestedBackward(torch.autograd.Function):
    """Calls `action` in an autograd thread while the main thread waits in the engine."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, action: Callable[[], object]) -> torch.Tensor:
        ctx.depth, ctx.action = depth, action
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.depth:
            with torch.enable_grad():
                run_backward(ctx.depth - 1, ctx.action)
        else:
            ctx.action()
        return grads[0], None, None


def run_backward(depth: int, action: Callable[[], object]) -> None:
    x = torch.ones(1, requires_grad=True)
    cast(torch.Tensor, NestedBackward.apply(x, depth, action)).sum().backward()


def test_a_backward_pass_is_shown_by_the_line_of_its_autograd_thread():
    observer = Observer()
    sink = GuardedSink(Sink(), print)
    sink.submit(lambda _: observer.block())

    def ready(frame: FrameType, stack: StackSummary) -> bool:
        return frame.f_code.co_name == "_engine_run_backward" and any(line.name == "flush" for line in stack)

    observing = Background("observer", lambda: observer.observe(ready))
    run_backward(DEPTH, lambda: sink.flush(30))  # the function in which the autograd thread waits
    observing.join()
    observing.raise_error()
    assert location_of(observer.stack).startswith("logs.py:") and location_of(observer.stack).endswith(" in flush")
