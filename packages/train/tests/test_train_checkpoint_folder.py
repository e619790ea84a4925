"""The folder of checkpoints, without ranks: kills before changes on disk, retention, damage, copies, other formats."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from armillary.train.checkpoint.checkpoints import commit
from armillary.train.checkpoint.output_folder import CheckpointFolder
from armillary.train.checkpoint.tensors_and_manifest import (
    MANIFEST,
    Manifest,
    checkpoint_fault,
    checksum,
    is_copy,
    write_recorded,
)

fork = multiprocessing.get_context("fork")  # a forked process need not import torch
EMPTY = Manifest(0, 1, 0, {"rows": 4}, {"model_type": "llama"}, "", {})


def save(folder: CheckpointFolder, step: int) -> None:
    """Saves a checkpoint of two files."""
    folder.begin(step)
    files = {}
    for name in ("rank-0.safetensors", "rank-1.safetensors"):
        files[name] = write_recorded(folder.partial(step) / name, [f"{name} of {step}".encode() * 100])
    commit(folder, replace(EMPTY, step=step, tokens=10 * step, files=files))


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
        assert steps and all(checkpoint_fault(folder, step) is None for step in steps)
        saved_steps.add(tuple(steps))
        folder.clear()
        assert folder.steps() == steps and not [name for name in folder.names() if ".partial" in name]
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        work()  # the next run
        assert folder.names() == ["step-2"] and Manifest.read(folder.path_of(2)).tokens == 20
        folder.path_of(2).rename(folder.path.with_name(f"done-{calls}"))
    assert calls > 10 and saved_steps == {(1,), (1, 2), (2,)}


def lose(path: Path) -> None:
    path.unlink()


def replaced(make: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda path: (path.unlink(), make(path))


def edited(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("rank-0.safetensors", edited(lambda old: old[:-1] + b"x"), "has other bytes than were written"),
        ("rank-0.safetensors", edited(lambda old: old[:-1]), "has 2299 of 2300 bytes"),
        ("rank-0.safetensors", lose, "cannot be read (No such file or directory)"),
        ("rank-0.safetensors", replaced(os.mkfifo), "cannot be read (it is not a regular file)"),
        ("rank-1.safetensors", edited(lambda old: b""), "has 0 of 2300 bytes"),
        (MANIFEST, edited(lambda old: old.replace(b'"tokens": 70', b'"tokens": 71')), "has other bytes than"),
        (MANIFEST, edited(lambda old: old[:50]), "cannot be read"),
        (MANIFEST, lose, "cannot be read"),
        (MANIFEST, replaced(lambda path: path.symlink_to("/dev/zero")), "cannot be read (it is not a regular file)"),
    ],
)
def test_every_change_of_a_checkpoint_is_named(folder, name, change, fault):
    save(folder, 7)
    assert checkpoint_fault(folder, 7) is None
    change(folder.path_of(7) / name)
    fault = f"{'' if name == MANIFEST else 'file '}{name} {fault}"
    faults = [checkpoint_fault(folder, 7, part, 3) for part in range(3)]  # one part per file, and one without files
    assert any(actual is not None and actual.startswith(fault) for actual in faults)
    assert checkpoint_fault(folder, 7).startswith(fault)


def test_a_file_that_the_disk_has_lost_is_not_committed(folder):
    for step, change in enumerate((edited(lambda old: old[:-1]), lose)):
        folder.begin(step)
        path = folder.partial(step) / "rank-0.safetensors"
        record = write_recorded(path, [b"content"])
        change(path)
        with pytest.raises(OSError, match=r"rank-0\.safetensors"):
            commit(folder, replace(EMPTY, step=step, files={path.name: record}))
    assert folder.steps() == []


def with_fields(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Changes fields of a manifest; removes those that are None."""
    return lambda fields: {name: value for name, value in (fields | changes).items() if value is not None}


def rewrite(folder: CheckpointFolder, step: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the fields of a manifest and updates its checksum."""
    manifest = folder.path_of(step) / MANIFEST
    fields = json.loads(manifest.read_text())
    fields.pop("crc32")
    fields = change(fields)
    manifest.write_text(json.dumps(fields | {"crc32": checksum(fields)} if isinstance(fields, dict) else fields))


def test_unknown_fields_are_ignored_and_new_fields_are_optional(folder):
    save(folder, 1)
    rewrite(folder, 1, with_fields(colour="red", settings={"lr": "1"}))
    assert checkpoint_fault(folder, 1) is None and Manifest.read(folder.path_of(1)).settings == {"lr": "1"}
    rewrite(folder, 1, with_fields(settings=None))
    assert checkpoint_fault(folder, 1) is None and Manifest.read(folder.path_of(1)).settings == {}


def file_named(name: str, size: int = 0, crc32: int = 0) -> dict[str, Any]:
    return {"files": {name: {"size": size, "crc32": crc32}}}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda fields: [fields], " cannot be read ("),
        (lambda fields: None, " cannot be read ("),
        (with_fields(step=None), ": step: Field required"),
        (with_fields(files=None), ": files: Field required"),
        (with_fields(format=None), ": format: None is not"),
        (with_fields(format="2"), ": format: '2' is not"),
        (with_fields(step="7"), ": step: Input should be a valid integer"),
        (with_fields(step=True), ": step: "),
        (with_fields(step=-7), ": step: "),
        (with_fields(tokens=10**18), ": tokens: "),
        (with_fields(ranks=0), ": ranks: "),
        (with_fields(ranks=10**18), ": ranks: "),
        (with_fields(**file_named("x", size=-1)), ": files.x.size: "),
        (with_fields(**file_named("x", crc32=-1)), ": files.x.crc32: "),
        (with_fields(files={"x": 3}), ": files.x: Input should be"),
        (with_fields(loader=[1]), ": loader: Input should be"),
        (with_fields(**file_named("../x")), ": files: '../x'"),
        (with_fields(**file_named("..")), ": files: '..'"),
        (with_fields(**file_named("")), ": files: ''"),
        (with_fields(**file_named("a\0")), r": files: 'a\x00'"),
        (with_fields(step=8), " is that of step 8"),
    ],
)
def test_a_malformed_manifest_is_damaged(folder, change, fault):
    save(folder, 7)
    rewrite(folder, 7, change)
    assert checkpoint_fault(folder, 7).startswith(f"manifest.json{fault}")


@pytest.mark.parametrize("name", [MANIFEST, "rank-0.safetensors"])
def test_a_file_that_may_not_be_read_is_not_damaged(folder, monkeypatch, name):
    save(folder, 7)
    real = os.open
    for error in (errno.EACCES, errno.EPERM, errno.ESTALE, errno.EMFILE):

        def opened(path, *args, error=error, **kwargs):
            if str(path).endswith(f"step-7/{name}"):
                raise OSError(error, os.strerror(error), str(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", opened)
        with pytest.raises(ValueError, match=rf"step-7/{name} cannot be read \({os.strerror(error)}\), though it may"):
            checkpoint_fault(folder, 7)


def test_a_copy_under_the_name_of_another_step_is_kept(folder):
    save(folder, 8)
    for step, name in {40: "step-40.copy", 41: "step-41.copy"}.items():
        shutil.copytree(folder.path_of(8), folder.path_of(step))
        assert checkpoint_fault(folder, step) == "manifest.json is that of step 8"
        assert folder.set_aside(step, is_copy(folder, step)).name == name
    shutil.copytree(folder.path_of(8), folder.path_of(40))
    assert folder.set_aside(40, is_copy(folder, 40)).name == "step-40.copy-1"
    save(folder, 40)
    folder.clear()
    assert sorted(folder.names()) == ["step-40", "step-40.copy", "step-40.copy-1", "step-41.copy", "step-8"]


def test_retention_keeps_the_newest_and_multiples_of_a_number(folder):
    """By numbers, not by names."""
    for steps, keep_last, keep_every, kept in (
        (range(9, 15), 2, None, [13, 14]),
        (range(1, 7), 1, 2, [2, 4, 6]),
        ([2, 4], 2, 3, [2, 4]),
        ([10, 9, 11, 100], 1, 5, [10, 100]),
        ([], 1, None, []),
    ):
        for step in steps:
            folder.path_of(step).mkdir(parents=True)
        assert folder.steps() == sorted(steps)
        folder.prune(keep_last, keep_every)
        assert folder.steps() == kept
        shutil.rmtree(folder.path, ignore_errors=True)


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
