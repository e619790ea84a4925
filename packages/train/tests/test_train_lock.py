"""The lock of an output folder: acquisition, loss, and changes after the loss."""

import json
import multiprocessing
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from training_runs import file_size_limit

from armillary.train import lock as locks
from armillary.train.checkpoint.checkpoints import commit
from armillary.train.checkpoint.output_folder import CheckpointFolder, remove
from armillary.train.checkpoint.tensors_and_manifest import Manifest
from armillary.train.lock import FolderInUse, Holder, LockLost, OutputLock, start_time, take
from armillary.train.logs import Journal

fork = multiprocessing.get_context("fork")


def acquire_lock(folder: Path, timeout: float = 0.2, **changes) -> locks.Claim:
    return take(folder, replace(Holder.this_process(), **changes), timeout, messages.append)


def is_running(**changes) -> bool | None:
    """Returns whether the process of a holder is running: this process, with the changes."""
    return replace(Holder.this_process(), **changes).is_running()


messages: list[str] = []


@pytest.fixture(autouse=True)
def clear_messages():
    messages.clear()


@pytest.fixture
def ended_process():
    """Id and start time of an ended process."""
    process = fork.Process(target=signal.pause)
    process.start()
    pid, started = process.pid, start_time(process.pid)
    process.kill()
    while start_time(pid) is not None:  # a zombie until it is joined
        pass
    assert is_running(pid=pid, started=started) is False
    process.join()
    return {"pid": pid, "started": started}


def test_processes_are_told_apart_by_id_and_start_time(ended_process):
    started = start_time(os.getpid())
    assert is_running() is True and is_running(started=started - 1) is False
    assert is_running(**ended_process) is False
    assert is_running(machine="another boot") is None and is_running(machine="", started=0) is None
    assert is_running(pid=2**40, started=1) is False and is_running(pid=10**30, started=1) is False


def test_the_error_of_a_full_disk_names_the_lock_file(tmp_path):
    """A file size limit of this process stands for a full disk."""
    with pytest.raises(OSError) as error, file_size_limit(1):
        acquire_lock(tmp_path / "lock")
    assert error.value.filename == str(tmp_path / "lock" / "1.held") and list((tmp_path / "lock").iterdir()) == []


def test_a_folder_is_refused_until_its_run_releases_it(tmp_path):
    first = acquire_lock(tmp_path / "lock")
    with pytest.raises(FolderInUse) as refusal:
        acquire_lock(tmp_path / "lock")
    holder = Holder.this_process()
    assert str(refusal.value) == (
        f"run {first.holder.run}, process {os.getpid()} on {holder.host}, begun {first.holder.since} works in it; wait "
        "for that run, end it, or name another folder"
    )
    first.check()
    first.release()
    with pytest.raises(LockLost):
        first.check()
    second = acquire_lock(tmp_path / "lock")
    assert (first.number, second.number) == (1, 2) and messages == []
    assert os.listdir(tmp_path / "lock") == ["2.held"]
    first.release()  # has no effect
    second.check()


def test_the_lock_of_an_ended_process_is_taken_at_once(tmp_path, ended_process):
    first = acquire_lock(tmp_path / "lock", **ended_process)
    second = acquire_lock(tmp_path / "lock")
    assert second.number == 2 and messages == []
    with pytest.raises(
        LockLost, match=rf"was taken over by run {second.holder.run}, .*; this is run {first.holder.run}"
    ):
        first.check()


def test_heartbeats_of_another_machine_are_awaited(tmp_path):
    first = acquire_lock(tmp_path / "lock", machine="another", host="far")
    beats = threading.Event()

    def beat():
        while not beats.wait(0.02):
            first.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(FolderInUse, match=r"on far, begun .* works in it"):
            acquire_lock(tmp_path / "lock", timeout=30)
    finally:
        beats.set()
        thread.join()
    second = acquire_lock(tmp_path / "lock")  # the heartbeats have stopped
    assert second.number == 2 and len(messages) == 2
    assert messages[0].startswith("waiting 30 s for a heartbeat of run ") and "on far" in messages[0]
    second.path.write_text("")  # an incomplete lock
    assert acquire_lock(tmp_path / "lock").number == 3
    assert messages[2].startswith("waiting 0 s for a heartbeat of an unknown run (")


def test_one_of_several_concurrent_runs_takes_the_lock(tmp_path, ended_process):
    acquire_lock(tmp_path / "lock", **ended_process)
    barrier, actual = threading.Barrier(8), []

    def acquire():
        barrier.wait()
        try:
            actual.append(acquire_lock(tmp_path / "lock", timeout=20))
        except FolderInUse as refusal:
            actual.append(refusal)

    threads = [threading.Thread(target=acquire) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (claim,) = [each for each in actual if isinstance(each, locks.Claim)]
    claim.check()
    assert len(actual) == 8 and os.listdir(tmp_path / "lock") == [claim.path.name]


def test_a_lock_that_is_completed_while_it_is_read_is_in_use(tmp_path, monkeypatch):
    claim = acquire_lock(tmp_path / "lock")
    content, read = claim.path.read_text(), locks.heartbeat
    claim.path.write_text("")

    def complete(path):
        monkeypatch.setattr(locks, "heartbeat", read)
        claim.path.write_text(content)
        return read(path)

    monkeypatch.setattr(locks, "heartbeat", complete)
    with pytest.raises(FolderInUse):
        acquire_lock(tmp_path / "lock", timeout=0.1)


@pytest.mark.parametrize("lock_name", ["2.released", "2.held", "9.held"])
def test_a_late_claim_yields(tmp_path, monkeypatch, lock_name):
    """Another run takes number 2 or 3 between the read of number 1 as released and the creation of number 2."""
    acquire_lock(tmp_path).release()
    real, numbers = locks.newest, []

    def late(path: Path):
        numbers.append(real(path))
        if len(numbers) == 1:
            acquire_lock(path).path.rename(path / lock_name)
        return numbers[-1]

    monkeypatch.setattr(locks, "newest", late)
    if lock_name == "2.released":
        assert acquire_lock(tmp_path).number == 3
    else:
        with pytest.raises(FolderInUse):
            acquire_lock(tmp_path)
        assert os.listdir(tmp_path) == [lock_name]


def test_a_removed_lock_is_lost_even_to_a_claim_of_the_same_number(tmp_path):
    first = acquire_lock(tmp_path / "lock")
    first.path.unlink()
    with pytest.raises(LockLost, match="no longer belongs to run"):
        first.check()
    second = acquire_lock(tmp_path / "lock")
    assert second.number == 1
    with pytest.raises(LockLost, match="no longer belongs to run"):
        first.check()
    first.release()
    second.check()


def test_a_run_that_lost_its_folder_commits_and_logs_nothing(tmp_path):
    first = acquire_lock(tmp_path / "lock", machine="another")
    folder = CheckpointFolder(tmp_path / "checkpoint", first.holder.run, first.check)
    journal = Journal(tmp_path / "metrics.jsonl", first.check)
    empty = Manifest(0, 1, 0, {}, {}, "", {})
    folder.begin(1)
    commit(folder, replace(empty, step=1))
    folder.begin(2)
    journal.event("saving", 2, "")
    written = journal.path.read_bytes()
    second = acquire_lock(tmp_path / "lock")
    for late in (
        lambda: commit(folder, replace(empty, step=2)),
        lambda: folder.begin(3),
        lambda: folder.prune(1, None),
        lambda: folder.set_aside(1, copy=False),
        folder.clear,
        lambda: journal.event("saved", 2, ""),
        lambda: journal.on_resume(0),
    ):
        with pytest.raises(LockLost):
            late()
    assert journal.path.read_bytes() == written
    after = CheckpointFolder(tmp_path / "checkpoint", second.holder.run, second.check)
    after.clear()
    # If the loss happens between the check and the rename, there is nothing to rename.
    with pytest.raises(OSError):
        commit(replace(folder, fence=lambda: None), replace(empty, step=2))
    assert after.steps() == [1]
    after.begin(2)
    remove(folder.partial(2))  # removes only its own files
    assert after.partial(2).is_dir() and after.partial(2) != folder.partial(2)


def enter_folder(output: Path) -> str:
    try:
        with OutputLock(output, print, timeout=0.2, flag="--train.output") as lock:
            lock.fence()
            return lock.run
    except ValueError as error:
        return f"refused: {error}"


def fail_to_lock(output: Path) -> str:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as failure:
        patch.setattr(locks, "take", lambda *_: {}["missing"])
        OutputLock(output, print).__enter__()
    return str(failure.value)


def test_all_ranks_raise_the_same_refusal(worlds, tmp_path):
    runs = worlds(2).run(enter_folder, tmp_path / "run")
    assert len(set(runs)) == 1 and len(runs[0]) == 12
    assert os.listdir(tmp_path / "run/lock") == ["1.released"]
    claim = acquire_lock(tmp_path / "run/lock")
    (tmp_path / "file").touch()
    for name, message in {
        "run": f"run {claim.holder.run}, process ",
        "file": "cannot be written to (Not a directory",
    }.items():
        for refusal in worlds(2).run(enter_folder, tmp_path / name):
            assert refusal.startswith(f"refused: --train.output {tmp_path / name}: {message}")
    assert worlds(2).run(fail_to_lock, tmp_path) == ["rank 0: KeyError: 'missing'"] * 2


def lose_folder(output: Path) -> list[str]:
    """Returns the error of a run that loses its folder during training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("armillary.train.lock.BEAT", 0.02)
        with OutputLock(output, print) as lock:
            lock.check()
            (output / "lock/1.held").rename(output / "lock/2.held")
            for _ in range(1000):
                try:
                    lock.check()
                except LockLost as lost:
                    return [str(lost)]
                threading.Event().wait(0.02)
    return []


def test_a_run_notices_the_loss_of_its_folder(worlds, tmp_path):
    ((message,),) = worlds(1).run(lose_folder, tmp_path)
    assert message.startswith(f"{tmp_path} was taken over by run ")
    assert json.loads((tmp_path / "lock/2.held").read_text())["run"] in message
