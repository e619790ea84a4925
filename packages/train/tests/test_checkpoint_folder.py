"""The folder of checkpoints: kills before any change on disk, retention, and records of files."""

import multiprocessing
import os
import signal
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from armillary.train.checkpoint.folder import CheckpointFolder, steps_to_delete
from armillary.train.checkpoint.manifest import (
    Damaged,
    FileRecord,
    file_fault,
    read_checked,
    write_checked,
    write_recorded,
)

fork = multiprocessing.get_context("fork")  # a forked process need not import torch


def save(folder: CheckpointFolder, step: int) -> None:
    """Saves a checkpoint of two files and a manifest."""
    folder.begin(step)
    files = {}
    for name in ("rank-0.safetensors", "rank-1.safetensors"):
        pieces = [f"{name} of {step}".encode() * 100]
        files[name] = asdict(write_recorded(folder.partial(step) / name, pieces))
    write_checked(folder.partial(step) / "about.json", {"tokens": 10 * step, "files": files})
    folder.complete(step)


def about(folder: CheckpointFolder, step: int) -> dict:
    return read_checked(folder.path_of(step) / "about.json")


def fault(folder: CheckpointFolder, step: int) -> str | None:
    files = {name: FileRecord(**record) for name, record in about(folder, step)["files"].items()}
    return file_fault(files, folder.path_of(step))


@pytest.fixture
def folder(tmp_path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "outputs" / "checkpoint")


def killed_after(calls, work):
    """Runs `work` and kills this process before its change number `calls` of the disk."""
    call_numbers = count()

    def change(call, *args, **kwargs):
        return call(*args, **kwargs) if next(call_numbers) < calls else os.kill(os.getpid(), signal.SIGKILL)

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
        setattr(os, name, partial(change, getattr(os, name)))
    work()


def test_a_kill_before_any_change_on_disk_leaves_a_usable_checkpoint(folder):
    """A damaged step 2 is saved again; step 1 must be removed only after step 2 is complete."""

    def work():
        folder.clear()
        if 2 not in folder.steps():
            save(folder, 2)
        folder.prune(1, None)

    saved_steps, calls = set(), 0
    for calls in count():
        save(folder, 1)
        folder.damaged_path(2).mkdir()
        process = fork.Process(target=killed_after, args=(calls, work))
        process.start()
        process.join()
        steps = folder.steps()
        assert steps and all(fault(folder, step) is None for step in steps)
        saved_steps.add(tuple(steps))
        folder.clear()
        assert folder.steps() == steps and not [name for name in folder.names() if ".partial" in name]
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        work()  # the next run
        assert folder.names() == ["step-2"] and about(folder, 2)["tokens"] == 20
        folder.path_of(2).rename(folder.path.with_name(f"done-{calls}"))
    assert calls > 10 and saved_steps == {(1,), (1, 2), (2,)}


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_each_file_is_verified_by_one_part(folder, parts):
    save(folder, 1)
    files = {name: FileRecord(**record) for name, record in about(folder, 1)["files"].items()}
    for name in files:
        path = folder.path_of(1) / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"x")
        actual = [file_fault(files, folder.path_of(1), part, parts) for part in range(parts)]
        assert list(filter(None, actual)) == [f"file {name} has other bytes than were written"]
        path.write_bytes(content)


def test_changed_fields_are_damaged_and_copies_are_kept(folder):
    for step in (1, 2):
        save(folder, step)
    path = folder.path_of(1) / "about.json"
    path.write_text(path.read_text().replace('"tokens": 10', '"tokens": 11'))
    with pytest.raises(Damaged, match=r"about\.json"):
        about(folder, 1)
    assert [folder.set_aside(1, copy=False).name, folder.set_aside(2, copy=True).name] == [
        "step-1.damaged",
        "step-2.copy",
    ]
    save(folder, 1)
    folder.clear()
    assert sorted(folder.names()) == ["step-1", "step-2.copy"]


def test_retention_keeps_the_newest_and_multiples_of_a_number(folder):
    assert steps_to_delete([1, 2, 3, 4, 5, 6], 2, None) == [1, 2, 3, 4]
    assert steps_to_delete([1, 2, 3, 4, 5, 6], 1, 2) == [1, 3, 5]
    assert steps_to_delete([2, 4], 2, 3) == [] and steps_to_delete([], 1, None) == []
    for step in (10, 9, 11, 100):
        save(folder, step)
    assert folder.steps() == [9, 10, 11, 100]  # sorted by number, not by name
    folder.prune(1, 5)
    assert sorted(folder.names()) == ["step-10", "step-100"]


def test_clear_removes_only_incomplete_checkpoints(folder):
    save(folder, 1)
    folder.begin(2)
    (folder.partial(2) / "rank-0.safetensors").write_bytes(b"half")
    (folder.path / "step-2.partial-0123456789ab").mkdir()  # left by another run
    (folder.path / "step-2.partial").mkdir()
    for name in ("step-3.damaged", "mine.partial", "step-x"):
        (folder.path / name).mkdir()
    (folder.path / f".seen-by-all-{'0' * 32}").touch()
    folder.clear()
    assert sorted(folder.names()) == ["mine.partial", "step-1", "step-3.damaged", "step-x"]
    assert folder.steps() == [1]


def test_a_file_records_its_size_and_checksum(tmp_path):
    record = write_recorded(tmp_path / "file", [b"abc", memoryview(bytes(10)), b""])
    assert record == FileRecord.of_file(tmp_path / "file") and record.size == 13
    with pytest.raises(OSError, match="No space left"):
        write_recorded(Path("/dev/full"), [b"abc"])
