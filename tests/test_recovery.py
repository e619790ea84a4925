"""Killed, stopped and hung runs under torchrun, and their restarts."""

import os
import random
import re
import signal
import time
from pathlib import Path
from shutil import rmtree

from launches import PATIENCE, TRAINER, Launch, agent, torchrun
from recovery import SMALL, STEPS, assert_same_end, cause, folder, training

from armillary.train.reporting import read_records


def test_run_with_two_killed_ranks_ends_like_one_without_failures(undisturbed, tmp_path):
    chance = random.Random(7)
    run_folder = folder(tmp_path, "killed")
    with Launch(training("--max-restarts", "3"), run_folder) as launch:
        end = 0
        for target in (5, 11):
            end = launch.wait_for(rf"^step: {target} ", end)
            time.sleep(chance.uniform(0, 0.1))
            launch.signal(signal.SIGKILL, chance.randrange(4))
            end = len(launch.printed)
        assert launch.wait() == 0, launch.printed
        output = launch.printed
    # Two restarts from a checkpoint, or from step 1 if the first checkpoint was not complete yet.
    assert len(re.findall("resuming from|^step: 1 ", output, re.MULTILINE)) == 1 + 2
    # Before each restart one rank prints the cause; torchrun prints nothing.
    assert len(re.findall(r"^\[rank \d\] armillary-train: failed in step \d+", output, re.MULTILINE)) == 2
    missing = r"^\[rank \d\] armillary-train: missing: rank \d: no heartbeat since step"
    assert len(re.findall(missing, output, re.MULTILINE)) == 2
    assert_same_end(run_folder, output, undisturbed)


def test_the_last_line_of_a_failed_run_is_the_cause(tmp_path):
    """With ranks that are not forked: torchrun prints the error of only one forked rank."""
    run_folder = folder(tmp_path, "failed")
    with Launch(["torchrun", "--nproc-per-node", "4", TRAINER, *SMALL], run_folder) as launch:
        start = launch.wait_for("^step: 5 ")
        launch.signal(signal.SIGKILL, 2)
        assert launch.wait() == 1, launch.printed
        output = launch.printed[start:]
    missing = r"missing: rank 2: no heartbeat since step \d+"
    assert re.fullmatch(rf"\[rank [013]\] armillary-train: {missing}", cause(output)), output
    assert len(re.findall(missing, output)) == 1, output
    # torchrun prints the rest: 66 lines, of which 16 are its own traceback.
    assert len(re.sub("^step: .*\n", "", output, flags=re.MULTILINE).splitlines()) < 75, output


def test_a_run_stopped_by_a_signal_saves_and_resumes(undisturbed, tmp_path):
    run_folder = folder(tmp_path, "stopped")
    output = ""
    with Launch(training(), run_folder) as launch:
        launch.wait_for("^step: 3 ")
        launch.signal(signal.SIGUSR1, 2)  # on one rank
        launch.signal(signal.SIGTERM, 0, 1, 2, 3)  # then a second signal, on all ranks
        assert launch.wait() == 0, launch.printed
        output += launch.printed
    assert re.search(rf"^stopped by a signal after step \d+ of {STEPS}; the same", output, re.MULTILINE)
    with Launch(training(), run_folder) as launch:
        assert launch.wait() == 0, launch.printed
        output += launch.printed
    assert len(re.findall("^stopped by a signal after step", output, re.MULTILINE)) == 1
    assert len(re.findall("resuming from", output)) == 1
    assert_same_end(run_folder, output, undisturbed)


def test_torchrun_forwards_a_signal_and_exits_with_1_after_the_save(tmp_path):
    """With ranks that are not forked: torchrun only waits for forked ranks."""
    run_folder = folder(tmp_path, "handed-on")
    with Launch(torchrun(1, *SMALL, "--train.steps", "100000"), run_folder) as launch:
        launch.wait_for("^step: 2 ")
        launch.signal(signal.SIGTERM)
        assert launch.wait() == 1
        stopped = re.search(r"^stopped by a signal after step (\d+) of 100000", launch.printed, re.MULTILINE)
        assert stopped and "got signal: 15" in launch.printed
    assert (run_folder / f"outputs/checkpoint/step-{stopped[1]}/manifest.json").is_file()


def test_second_run_is_refused_until_orphaned_ranks_end(undisturbed, tmp_path):
    run_folder = folder(tmp_path, "orphaned")
    with Launch(training(), run_folder) as launch:
        launch.wait_for("^step: 5 ")
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
        output = launch.printed
    assert (
        len(re.findall(r"^\[rank \d\] armillary-train: ends in step .*: torchrun \(process", output, re.MULTILINE)) > 0
    )
    with Launch(training(), run_folder) as launch:
        assert launch.wait() == 0, launch.printed
        output += launch.printed
    steps = [record["step"] for record in read_records(run_folder / "outputs/metrics.jsonl") if "loss" in record]
    assert steps == list(range(1, STEPS + 1))
    assert_same_end(run_folder, output, undisturbed)


SLOW_SAVES = """
import os, time
from armillary.train.checkpoint import Checkpoints, storage

start, write_recorded = Checkpoints.start, storage.write_recorded
slow = int(os.environ["RANK"]) % 3 == 0 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2

def start_slowly(checkpoints, step):
    start(checkpoints, step)
    time.sleep(slow)

def write_slowly(path, pieces):
    time.sleep(2 * slow)
    return write_recorded(path, pieces)

Checkpoints.start, storage.write_recorded = start_slowly, write_slowly
import forked_rank
"""


def test_all_ranks_name_a_rank_killed_during_a_background_save(undisturbed, tmp_path):
    """The other ranks wait for it in the next step and in the barrier of the save."""
    run_folder = folder(tmp_path, "killed-saving")
    (run_folder / "slow_saves.py").write_text(SLOW_SAVES)
    kills = [(3, 0.5), (3, 1.7)]  # seconds into the save: rank 3 sleeps in it; it is past it and its writer sleeps
    with Launch(training("--max-restarts", str(len(kills)), script="slow_saves.py"), run_folder) as launch:
        for rank, seconds in kills:
            resumed = launch.wait_for("^step: ", len(launch.printed))
            while not list((run_folder / "outputs/checkpoint").glob("step-*.partial-*")):
                assert launch.process.poll() is None, launch.printed
                time.sleep(0.01)
            time.sleep(seconds)
            launch.signal(signal.SIGKILL, rank)
            restarted = launch.wait_for("resuming from|^step: 1 ", resumed)
            messages = launch.printed[resumed:restarted]
            missing = rf"missing: rank {rank}: no heartbeat"
            assert len(re.findall(rf"^\[rank \d\] armillary-train: {missing}", messages, re.MULTILINE)) == 1, messages
            hangs = {path.stem: path.read_text() for path in (run_folder / "outputs/hang").iterdir()}
            assert hangs.keys() == {f"rank-{i}" for i in {*range(4)} - {rank}}
            assert all(missing in text for text in hangs.values()), hangs
            rmtree(run_folder / "outputs/hang")
        assert launch.wait() == 0, launch.printed
        output = launch.printed
    assert_same_end(run_folder, output, undisturbed)


ASLEEP = """
import os, time
import armillary.train.trainer as trainer

real = trainer.train_step

def train_step(run, step, batches):
    while step == 6 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        time.sleep(0.1)  # nap
    return real(run, step, batches)

trainer.train_step = train_step
import forked_rank
"""


def test_all_ranks_name_a_hung_rank_and_the_run_restarts(tmp_path):
    """First a rank that is stopped and posts no heartbeats, then one that sleeps in Python."""
    run_folder = folder(tmp_path, "hung")
    (run_folder / "asleep.py").write_text(ASLEEP)
    flags = [*SMALL, "--train.timeout-minutes", "0.25"]
    command = training("--max-restarts", "1", script="asleep.py", flags=flags)
    with Launch(command, run_folder) as launch:
        launch.wait_for("^step: 5 ")
        launch.signal(signal.SIGSTOP, 2)
        missing = r"missing: rank 2: no heartbeat since step \d+$"
        launch.wait_for(rf"^\[rank [013]\] armillary-train: {missing}")
        launch.signal(signal.SIGKILL, 2)  # torchrun would do so, after 30 seconds
        restarted = launch.wait_for("^step: 5 ", len(launch.printed))
        for rank in (0, 1, 3):  # every rank has named rank 2 before the restart
            assert re.search(missing, (run_folder / f"outputs/hang/rank-{rank}.txt").read_text(), re.MULTILINE)
        assert launch.wait() == 1, launch.printed
        second = launch.printed[restarted:]
    assert cause(second).endswith("missing: rank 1: in step 6, at asleep.py:9 in train_step")
    assert re.search(r"^ *\[rank \d\] armillary-train: step 6 takes longer than 15 s", second, re.MULTILINE)
    hangs = [(run_folder / f"outputs/hang/rank-{rank}.txt").read_text() for rank in range(4)]
    assert all("missing: rank 1: in step 6, at asleep.py:9 in train_step" in text for text in hangs)
    assert not any("missing: rank 0" in text for text in hangs)
    assert 'asleep.py", line 9 in train_step' in hangs[1]


def test_infinite_loss_exits_with_1_and_names_the_step(tmp_path):
    run_folder = folder(tmp_path, "burst")
    with Launch(
        training(flags=[*SMALL, "--optimizer.lr", "1e38", "--optimizer.warmup-steps", "1"]), run_folder
    ) as launch:
        assert launch.wait() == 1
        output = launch.printed
    failed = r"\[rank [0-3]\] armillary-train: failed in step \d+: FloatingPointError: step \d+: loss (nan|inf)"
    assert re.match(failed, cause(output)), output
    assert "in train_loop" not in output  # no traceback of a rank
