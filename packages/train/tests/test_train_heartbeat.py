"""Who is missing, from the signs of all ranks; and signals."""

import os
import signal
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from armillary.train.heartbeat import Calls, Heartbeat, main_stack, missing, waits, where
from armillary.train.stopping import StopSignal
from armillary.train.watchdog import about_others

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


def errors() -> list[bool]:
    """Whether errors are about other ranks: one that does not come to a collective, and one of this rank's own."""
    group, found = dist.new_group(timeout=timedelta(seconds=0.2)), []
    for action in (lambda: dist.get_rank() == 0 and dist.barrier(group), lambda: torch.ones(2) + torch.ones(3)):
        try:
            action()
        except RuntimeError as error:
            found.append(about_others(error))
    return found


def test_errors_of_communication_are_told_from_others(worlds):
    assert worlds(2).run(errors) == [[True, False], [False]]


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
