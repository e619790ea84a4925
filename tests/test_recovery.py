"""Killed, stopped and hung runs under torchrun, and their restarts."""

import os
import random
import re
import signal
import time
from functools import partial
from pathlib import Path
from shutil import rmtree

from launches import PATIENCE, TRAINER, Launch, agent
from recovery import SMALL, STEPS, assert_same_end, cause, folder, training
from torch.distributed.run import main as run_torchrun

from armillary.train.logs import read_records


def unforked(ranks: int, *arguments: str) -> partial[None]:
    """Returns a function that runs torchrun, which starts its ranks like its command: it does more for these."""
    return partial(run_torchrun, ["--nproc-per-node", str(ranks), *arguments])


def test_the_last_line_of_a_failed_run_is_the_cause(tmp_path):
    """With ranks that are not forked: torchrun prints the error of only one forked rank."""
    run_folder = folder(tmp_path, "failed")
    with Launch(unforked(3, TRAINER, *SMALL, "--data.global-batch-size", "3"), run_folder) as launch:
        start = launch.wait_for("^step: 5 ")
        launch.signal(signal.SIGKILL, 2)
        assert launch.wait() == 1, launch.printed
        output = launch.printed[start:]
    missing = r"missing: rank 2: no heartbeat since step \d+"
    assert re.fullmatch(rf"\[rank [01]\] armillary-train: {missing}", cause(output)), output
    assert len(re.findall(missing, output)) == 1, output
    # torchrun prints the rest, of which 16 lines are its own traceback.
    assert len(re.sub("^step: .*\n", "", output, flags=re.MULTILINE).splitlines()) < 75, output


def test_torchrun_forwards_a_signal_and_exits_with_1_after_the_save(tmp_path):
    """With ranks that are not forked: torchrun only waits for forked ranks."""
    run_folder = folder(tmp_path, "handed-on")
    with Launch(unforked(1, "-m", "armillary.train", *SMALL, "--train.steps", "100000"), run_folder) as launch:
        launch.wait_for("^step: 2 ")
        launch.signal(signal.SIGTERM)
        assert launch.wait() == 1
        stopped = re.search(r"^stopped by a signal after step (\d+) of 100000", launch.printed, re.MULTILINE)
        assert stopped and "got signal: 15" in launch.printed
    assert (run_folder / f"outputs/checkpoint/step-{stopped[1]}/manifest.json").is_file()


def test_a_run_stopped_and_one_without_torchrun_are_resumed(undisturbed, tmp_path):
    """A run stopped by a signal saves. Ranks whose torchrun is dead refuse another run until they end themselves."""
    run_folder = folder(tmp_path, "stopped")
    with Launch(training(), run_folder) as launch:
        launch.wait_for("^step: 3 ")
        launch.signal(signal.SIGUSR1, 2)  # on one rank
        launch.signal(signal.SIGTERM, 0, 1, 2, 3)  # then a second signal, on all ranks
        assert launch.wait() == 0, launch.printed
        output = launch.printed
    (stopped,) = re.findall(rf"^stopped by a signal after step (\d+) of {STEPS}; the same", output, re.MULTILINE)
    assert (run_folder / f"outputs/checkpoint/step-{stopped}").is_dir()
    with Launch(training(), run_folder) as launch:
        launch.wait_for("^step: ")
        ranks = launch.ranks()
        launch.signal(signal.SIGSTOP, *ranks)  # so that they do not finish before the second run starts
        holder = rf"run [0-9a-f]{{12}}, process {ranks[0]} on \S+, begun \S+ works in it"
        with Launch(agent("--nproc-per-node", "1", flags=SMALL), run_folder) as second:
            assert second.wait() == 1  # torchrun's exit code
            refused = (
                rf"^ *\[rank 0\] armillary-train: --train\.output outputs: {holder}; wait for that run, end it, or name"
            )
            assert re.search(refused, second.printed, re.MULTILINE), second.printed
            assert re.search(r"exitcode *: 2 ", second.printed), second.printed
        launch.signal(signal.SIGKILL)  # torchrun, which cannot signal its ranks
        launch.wait()
        for pid in ranks.values():
            os.kill(pid, signal.SIGCONT)
        end = time.monotonic() + PATIENCE
        while any(Path(f"/proc/{pid}").exists() for pid in ranks.values()):
            assert time.monotonic() < end, launch.printed
            time.sleep(0.05)
        assert f"resuming from outputs/checkpoint/step-{stopped}" in launch.printed
        output += launch.printed
    assert re.search(r"^\[rank \d\] armillary-train: ends in step .*: torchrun \(process", output, re.MULTILINE)
    with Launch(training(), run_folder) as launch:
        assert launch.wait() == 0, launch.printed
        output += launch.printed
    assert len(re.findall("resuming from", output)) == 2
    steps = [record["step"] for record in read_records(run_folder / "outputs/metrics.jsonl") if "loss" in record]
    assert steps == list(range(1, STEPS + 1))
    assert_same_end(run_folder, output, undisturbed)


SLOW_SAVES = """
import os, time
from armillary.train.checkpoint import Checkpoints, tensors_and_manifest

start, write_recorded = Checkpoints.start, tensors_and_manifest.write_recorded
slow = int(os.environ["RANK"]) % 3 == 0 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) in (1, 2)

def start_slowly(checkpoints, step):
    start(checkpoints, step)
    time.sleep(slow)

def write_slowly(path, pieces):
    time.sleep(2 * slow)
    return write_recorded(path, pieces)

Checkpoints.start, tensors_and_manifest.write_recorded = start_slowly, write_slowly
import forked_rank
"""


def test_a_run_with_ranks_killed_in_a_step_and_during_saves_ends_like_one_without_failures(undisturbed, tmp_path):
    """During a background save the other ranks wait in the next step and in the barrier of the save."""
    run_folder, chance = folder(tmp_path, "killed"), random.Random(7)
    (run_folder / "slow_saves.py").write_text(SLOW_SAVES)
    with Launch(training("--max-restarts", "3", script="slow_saves.py"), run_folder) as launch:
        start = 0
        # Seconds into a save: rank 3 sleeps in it; later it is past it, and its writer sleeps.
        for rank, seconds in ((chance.randrange(4), None), (3, 0.5), (3, 1.7)):
            if seconds is None:
                launch.wait_for("^step: 5 ")
                time.sleep(chance.uniform(0, 0.1))
            else:
                start = launch.wait_for("^step: ", len(launch.printed))
                while not list((run_folder / "outputs/checkpoint").glob("step-*.partial-*")):
                    assert launch.process.poll() is None, launch.printed
                    time.sleep(0.01)
                time.sleep(seconds)
            launch.signal(signal.SIGKILL, rank)
            missing = rf"missing: rank {rank}: no heartbeat since step"
            killed = launch.wait_for(rf"^\[rank \d\] armillary-train: {missing}", start)
            restarted = launch.wait_for("resuming from|^step: 1 ", killed)  # from step 1 if no checkpoint is complete
            # Before the restart one rank prints the cause; torchrun prints nothing.
            messages = launch.printed[start:restarted]
            assert len(re.findall(rf"^\[rank \d\] armillary-train: {missing}", messages, re.MULTILINE)) == 1, messages
            assert len(re.findall(r"^\[rank \d\] armillary-train: failed in step \d+", messages, re.MULTILINE)) == 1
            hangs = {path.stem: path.read_text() for path in (run_folder / "outputs/hang").iterdir()}
            assert hangs.keys() == {f"rank-{i}" for i in {*range(4)} - {rank}}
            assert all(missing in text for text in hangs.values()), hangs
            rmtree(run_folder / "outputs/hang")
            start = restarted
        assert launch.wait() == 0, launch.printed
        output = launch.printed
    assert_same_end(run_folder, output, undisturbed)


FAULTY = """
import os, time
import torch
import armillary.train.loop as loop

real, restarts = loop.train_step, os.environ["TORCHELASTIC_RESTART_COUNT"]

def train_step(run, step, batches, observer):
    while step == 6 and os.environ["RANK"] == "1" and restarts == "1":
        time.sleep(0.1)  # nap
    if step == 6 and restarts == "2":
        with torch.no_grad():
            for weight in run.model.parameters():
                weight.mul_(float("inf"))
    return real(run, step, batches, observer)

loop.train_step = train_step
import forked_rank
"""


def test_all_ranks_name_a_hung_rank_and_the_run_restarts_until_its_loss_is_not_finite(tmp_path):
    """First a rank is stopped and posts no heartbeats, then one sleeps in Python, and then the loss is NaN."""
    run_folder = folder(tmp_path, "hung")
    (run_folder / "faulty.py").write_text(FAULTY)
    flags = [*SMALL, "--train.timeout-minutes", "0.15"]

    def hangs() -> list[str]:
        return [(run_folder / f"outputs/hang/rank-{rank}.txt").read_text() for rank in range(4)]

    with Launch(training("--max-restarts", "2", script="faulty.py", flags=flags), run_folder) as launch:
        launch.wait_for("^step: 5 ")
        launch.signal(signal.SIGSTOP, 2)
        missing = r"missing: rank 2: no heartbeat since step \d+$"
        launch.wait_for(rf"^\[rank [013]\] armillary-train: {missing}")
        launch.signal(signal.SIGKILL, 2)  # torchrun would do so, after 30 seconds
        restarted = launch.wait_for("^step: 5 ", len(launch.printed))
        for rank in (0, 1, 3):  # every rank has named rank 2 before the restart
            assert re.search(missing, (run_folder / f"outputs/hang/rank-{rank}.txt").read_text(), re.MULTILINE)
        again = launch.wait_for("^step: 5 ", restarted)
        second, texts = launch.printed[restarted:again], hangs()
        assert launch.wait() == 1, launch.printed
        third = launch.printed[again:]
    missing = "missing: rank 1: in step 6, at faulty.py:10 in train_step"
    assert len(re.findall(rf"^\[rank \d\] armillary-train: {missing}$", second, re.MULTILINE)) == 1, second
    assert re.search(r"^ *\[rank \d\] armillary-train: step 6 takes longer than 9 s", second, re.MULTILINE)
    assert all(missing in text and "missing: rank 0" not in text for text in texts)
    assert 'faulty.py", line 10 in train_step' in texts[1]
    failed = r"\[rank [0-3]\] armillary-train: failed in step 6: FloatingPointError: step 6: loss (nan|inf)"
    assert re.match(failed, cause(third)), third
    assert "in train_loop" not in third  # no traceback of a rank
