"""Runs that are killed, stopped and hung for real, under torchrun, and what is left of them."""

import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from launches import Launch, torchrun
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

STEPS = 24
SMALL = (
    "--model.dim 32 --model.layers 1 --model.heads 4 --model.kv-heads 2 --model.hidden-dim 64 --data.path text.txt "
    "--data.sequence-length 64 --data.rows 4 --data.validation-fraction 0.5 --validation.batches 1 --log.every 1 "
    f"--validation.every 12 --save.every 4 --train.device cpu --train.steps {STEPS}"
).split()


def folder(parent: Path, name: str) -> Path:
    """A folder to run in, with a text to train on."""
    made = parent / name
    made.mkdir()
    (made / "text.txt").write_text("".join(f"{i} times {i} is {i * i}. " for i in range(2000)))
    return made


def training(*torchrun_flags: str, flags: tuple[str, ...] = ()) -> list[str]:
    """torchrun with 4 ranks."""
    command = torchrun(4, *SMALL, *flags)
    return [command[0], *torchrun_flags, *command[1:]]


def losses(printed: str) -> dict[int, str]:
    """By step, as printed last: of a step that was trained twice, the second time."""
    return {int(step): loss for step, loss in re.findall(r"^step: (\d+) loss: (\S+)", printed, re.MULTILINE)}


def weights(where: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint: weights and the optimizer's state."""
    dcp_to_torch_save(where / f"outputs/checkpoint/step-{STEPS}", where / "last.pt")
    return dict(tensors("", torch.load(where / "last.pt", weights_only=False)))


def tensors(name: str, value: object):
    if isinstance(value, torch.Tensor):
        yield name, value
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from tensors(f"{name}.{key}", inner)


def assert_same_end(where: Path, printed: str, undisturbed: tuple[Path, str]) -> None:
    """Every loss is that of the undisturbed run, and so is every number that training has left behind."""
    expected, found = weights(undisturbed[0]), weights(where)
    assert losses(printed) == losses(undisturbed[1])
    assert expected.keys() == found.keys() and len(expected) > 20
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, str]:
    """A run that nobody disturbs: its folder, and what it printed."""
    where = folder(tmp_path_factory.mktemp("recovery"), "undisturbed")
    with Launch(training(), where) as launch:
        assert launch.wait() == 0, launch.printed
        assert list(losses(launch.printed)) == list(range(1, STEPS + 1))
        return where, launch.printed


def test_a_run_whose_ranks_are_killed_thrice_ends_as_if_nobody_had_been(undisturbed, tmp_path):
    chance = random.Random(7)
    where = folder(tmp_path, "killed")
    with Launch(training("--max-restarts", "3"), where) as launch:
        seen = 0
        for target in (5, 11, 17):
            seen = launch.wait_for(rf"^step: {target} ", seen)
            time.sleep(chance.uniform(0, 0.1))
            launch.signal(signal.SIGKILL, chance.randrange(4))
            seen = len(launch.printed)
        assert launch.wait() == 0, launch.printed
        printed = launch.printed
    assert len(re.findall("going on from", printed)) == 3
    assert re.search(r"^\[rank \d\] armillary-train: failed in step \d+", printed, re.MULTILINE)
    assert re.search(
        r"^\[rank \d\] armillary-train: missing: rank \d: no sign of life since step", printed, re.MULTILINE
    )
    assert_same_end(where, printed, undisturbed)


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_where_it_was(undisturbed, tmp_path):
    where = folder(tmp_path, "stopped")
    printed = ""
    with Launch(training(), where) as launch:
        launch.wait_for("^step: 3 ")
        launch.signal(signal.SIGTERM, 2)  # one rank hears it
        assert launch.wait() == 0, launch.printed
        printed += launch.printed
    assert re.search(rf"^stopped after step \d+ of {STEPS}, as asked by a signal; the same", printed, re.MULTILINE)
    with Launch(training(), where) as launch:
        launch.wait_for(f"^step: {max(losses(printed)) + 2} ")
        launch.signal(signal.SIGUSR1, 0, 1, 2, 3)
        launch.signal(signal.SIGTERM, 0, 1, 2, 3)  # again, while it saves
        assert launch.wait() == 0, launch.printed
        printed += launch.printed
    with Launch(training("--signals-to-handle", "SIGTERM,SIGUSR1"), where) as launch:
        launch.wait_for(f"^step: {max(losses(printed)) + 2} ")
        launch.signal(signal.SIGUSR1)  # torchrun hands it on, and then fails, whatever its ranks do
        assert launch.wait() == 1
        printed += launch.printed
    assert "got signal: 10" in launch.printed or "SIGUSR1" in launch.printed
    with Launch(training(), where) as launch:
        assert launch.wait() == 0, launch.printed
        printed += launch.printed
    assert len(re.findall("^stopped after step", printed, re.MULTILINE)) == 3
    assert len(re.findall("going on from", printed)) == 3
    assert_same_end(where, printed, undisturbed)


ASLEEP = """
import os, sys, time
import armillary.train.trainer as trainer
from armillary.train.cli import main

real = trainer.train_step

def train_step(run, step, batches):
    while step == 6 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        time.sleep(0.1)  # nap
    return real(run, step, batches)

trainer.train_step = train_step
main(sys.argv[1:])
"""


def test_hung_ranks_are_named_by_all_others_and_the_run_starts_again(tmp_path):
    """First one that is stopped and can say nothing more, then one that sleeps somewhere in Python."""
    where = folder(tmp_path, "hung")
    (where / "asleep.py").write_text(ASLEEP)
    command = [
        "torchrun",
        "--max-restarts",
        "1",
        "--nproc-per-node",
        "4",
        "asleep.py",
        *SMALL,
        "--train.timeout-minutes",
        "0.1",
    ]
    with Launch(command, where) as launch:
        launch.wait_for("^step: 5 ")
        launch.signal(signal.SIGSTOP, 2)
        for rank in (0, 1, 3):
            launch.wait_for(rf"^\[rank {rank}\] armillary-train: missing: rank 2: no sign of life since step \d+$")
        launch.signal(signal.SIGKILL, 2)  # torchrun would do so, after 30 seconds
        restarted = launch.wait_for("^step: 5 ", len(launch.printed))
        assert launch.wait() == 1, launch.printed
        second = launch.printed[restarted:]
    for rank in range(4):
        assert re.search(
            rf"\[rank {rank}\] armillary-train: missing: rank 1: in step 6, at asleep.py:10 in train_step", second
        ), second
    assert "missing: rank 0" not in second
    stacks = (where / "outputs/hang/rank-1.txt").read_text()
    assert 'asleep.py", line 10 in train_step' in stacks
    assert "TimeoutError: step 6 takes longer than 6 s" in second  # torchrun's account of the cause
