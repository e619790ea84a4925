"""Who is missing, from the signs of all ranks; and signals."""

import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from traceback import StackSummary
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from armillary.train.runtime.health.heartbeat import (
    Calls,
    Heartbeat,
    in_standard_library,
    joined,
    main_stack,
    missing,
    waits,
    where,
)
from armillary.train.runtime.health.launcher import Launcher
from armillary.train.runtime.health.stopping import StopSignal
from armillary.train.runtime.health.watchdog import about_others

WAITING = Heartbeat(
    7, "training", where="step.py:60 in summed", waits=True, calls={"0": Calls(12, "gloo:all_reduce", True)}
)


@pytest.mark.parametrize(
    ("two", "silent", "said"),
    [
        (None, set(), "has never given a sign of life"),
        (Heartbeat(5, "saving"), {2}, "no sign of life since step 5 (saving)"),
        (Heartbeat(7, "training", failure="KeyError: 'x'"), set(), "failed in step 7: KeyError: 'x'"),
        (replace(WAITING, waits=False, where="rows.py:3 in read"), set(), "in step 7, at rows.py:3 in read"),
        (
            replace(WAITING, calls={"0": Calls(11, "gloo:broadcast", True)}),
            set(),
            "in step 7, has entered 11 collectives of group '0', others 12; at step.py:60 in summed",
        ),
    ],
)
def test_the_rank_that_others_wait_for_is_found(two, silent, said):
    beats = {0: WAITING, 1: WAITING, 2: two, 3: WAITING}
    assert missing(beats, silent) == {2: said}
    assert two is None or Heartbeat.read(two.text()) == two


def test_no_rank_is_blamed_where_all_wait_for_each_other():
    assert missing(dict.fromkeys(range(4), WAITING), set()) == {}


def test_no_rank_is_blamed_for_a_collective_that_nobody_waits_in():
    done = replace(WAITING, calls={"0": Calls(12, "gloo:broadcast", False), "1": Calls(3, "gloo:all_reduce", True)})
    behind = replace(done, calls={**done.calls, "0": Calls(11, "gloo:broadcast", True)})
    assert missing({0: done, 1: behind}, set()) == {}


def errors() -> list[bool]:
    """Whether errors are about other ranks: one that does not come to a collective, and one of this rank's own."""
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    sums = DTensor.from_local(torch.ones(2), DeviceMesh.from_group(group, "cpu"), [Partial()], run_check=False)
    common = (lambda: dist.barrier(group), lambda: sums.full_tensor())
    own = (lambda: torch.ones(2) + torch.ones(3), lambda: sums + DTensor.from_local(torch.ones(3), sums.device_mesh))
    return [about_others(error_of(action)) for action in (*(common if dist.get_rank() == 0 else ()), *own)]


def error_of(action: Callable[[], object]) -> RuntimeError:
    with pytest.raises(RuntimeError) as failure:
        action()
    return failure.value


def test_errors_of_communication_are_told_from_others(worlds):
    """Also where a DTensor communicates, and torch has several functions between the wait and the error."""
    assert worlds(2).run(errors) == [[True, True, False, False], [False, False]]


@pytest.mark.parametrize(
    ("files", "communicates"),
    [
        (["train/step.py", "core/collectives/exchange.py", "core/compat.py", "core/compat.py"], True),
        (["train/step.py", "core/collectives/collective.py", "core/testing/staged.py"], True),
        (
            ["train/step.py", "core/collectives/exchange.py", "core/compat.py", sysconfig.get_path("stdlib") + "/a.py"],
            True,
        ),
        (["core/collectives/collective.py", "attention/tiling/merge.py"], False),
        (["train/trainer.py", "core/gradients.py"], False),
        ([], False),
    ],
)
def test_a_stack_that_ends_in_communication_is_told_from_others(files, communicates):
    """Called there are also the functions that hide torch's versions, and backends written in Python."""
    lines = [(file if file.startswith("/") else f"/src/armillary/{file}", 1, "function", "") for file in files]
    assert waits(StackSummary.from_list(lines)) == communicates


def test_a_signal_is_heard_in_the_block_in_hand_and_in_the_one_around_it():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        with stop:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.heard
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_of_the_main_thread_nothing_is_heard_and_nothing_raised():
    heard = []

    def run() -> None:
        with StopSignal() as stop:
            heard.append(stop.heard)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert heard == [False]


def test_a_rank_knows_where_it_stands():
    stack = main_stack()
    assert where(stack).startswith("heartbeat.py:") and "main_stack" in where(stack)
    assert not waits(stack)


class Slow:
    """Work in a thread that stands still until somebody has looked at the main thread."""

    def __init__(self) -> None:
        self.looked = threading.Event()
        self.seen = ""

    def stand(self) -> None:
        self.looked.wait()

    def look(self, waits: Callable[[FrameType], object]) -> None:
        """Once the main thread waits, as it will soon."""
        thread = threading.main_thread().ident
        while not waits(sys._current_frames()[thread]):
            time.sleep(0.01)
        self.seen = where(main_stack())
        self.looked.set()


def test_a_wait_in_pythons_own_code_is_told_by_the_line_that_waits():
    slow = Slow()
    with ThreadPoolExecutor(2) as pool:
        standing = pool.submit(slow.stand)
        pool.submit(slow.look, lambda frame: frame.f_back.f_code.co_name == "result")
        standing.result()
    assert slow.seen.startswith("test_health.py:")
    assert slow.seen.endswith(" in test_a_wait_in_pythons_own_code_is_told_by_the_line_that_waits")


def test_a_wait_for_the_end_of_a_thread_is_told_by_where_that_stands():
    slow = Slow()
    saving, looking = threading.Thread(target=slow.stand), threading.Thread(target=slow.look, args=(joined,))
    saving.start()
    looking.start()
    saving.join()
    looking.join()
    assert slow.seen.startswith("test_health.py:") and slow.seen.endswith(" in stand")


def waits_for_a_save() -> bool:
    """Whether a rank counts as waiting for others when its main thread waits for a thread that does."""
    group = dist.new_group(timeout=timedelta(seconds=30))
    done, seen = threading.Event(), []

    def look() -> None:
        thread = threading.main_thread().ident
        while joined(sys._current_frames()[thread]) is None or not waits(main_stack()):
            time.sleep(0.01)
        seen.append(True)
        done.set()

    if dist.get_rank() == 0:
        looking = threading.Thread(target=look)
        saving = threading.Thread(target=dist.barrier, args=(group,))
        saving.start()
        looking.start()
        saving.join()
        looking.join()
    else:
        time.sleep(1)
        dist.barrier(group)
    return seen == [True]


def test_a_rank_that_waits_for_a_thread_in_a_collective_waits_for_others(worlds):
    assert worlds(2).run(waits_for_a_save) == [True, False]


@pytest.mark.parametrize(
    ("file", "own"),
    [
        (threading.__file__, True),
        ("<frozen importlib._bootstrap>", True),
        (torch.__file__, False),
        (__file__, False),
        (f"{sysconfig.get_path('stdlib')}/site-packages/x.py", False),
        (f"{sysconfig.get_path('stdlib')}/dist-packages/x.py", False),
    ],
)
def test_pythons_own_files_are_known(file, own):
    assert in_standard_library(file) is own


def test_a_launcher_is_gone_when_the_parent_is_another_one(monkeypatch):
    alone = Launcher()
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    launched = Launcher()
    assert launched.pid == os.getppid() and not launched.gone
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert launched.gone and not alone.gone
