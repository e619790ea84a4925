"""The folder of checkpoints, without ranks: kills before changes on disk, retention, damage, copies, other formats."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from armillary.core.testing import refusal
from armillary.train.checkpoint.checkpoints import commit, first_differences
from armillary.train.checkpoint.export import main as export
from armillary.train.checkpoint.folder import CheckpointFolder
from armillary.train.checkpoint.storage import (
    MANIFEST,
    Damaged,
    FileRecord,
    Manifest,
    checkpoint_fault,
    checksum,
    file_fault,
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


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_each_file_is_verified_by_one_part(folder, parts):
    save(folder, 1)
    files = Manifest.read(folder.path_of(1)).files
    for name in files:
        path = folder.path_of(1) / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"x")
        actual = [file_fault(files, folder.path_of(1), part, parts) for part in range(parts)]
        assert list(filter(None, actual)) == [f"file {name} has other bytes than were written"]
        path.write_bytes(content)


def test_a_damaged_checkpoint_is_kept_until_its_step_is_saved_again(folder):
    save(folder, 1)
    assert folder.set_aside(1, copy=False).name == "step-1.damaged"
    save(folder, 1)
    folder.clear()
    assert folder.names() == ["step-1"]


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        (
            "rank-0.safetensors",
            lambda old: old[:-1] + b"x",
            "file rank-0.safetensors has other bytes than were written",
        ),
        ("rank-0.safetensors", lambda old: old[:-1], "file rank-0.safetensors has 2299 of 2300 bytes"),
        ("rank-0.safetensors", None, "file rank-0.safetensors cannot be read (No such file or directory)"),
        ("rank-1.safetensors", lambda old: b"", "file rank-1.safetensors has 0 of 2300 bytes"),
        (MANIFEST, lambda old: old.replace(b'"tokens": 70', b'"tokens": 71'), "manifest.json has other bytes than"),
        (MANIFEST, lambda old: old[:50], "manifest.json cannot be read"),
        (MANIFEST, None, "manifest.json cannot be read"),
    ],
)
def test_every_change_of_a_checkpoint_is_named(folder, name, change, fault):
    save(folder, 7)
    assert checkpoint_fault(folder, 7) is None
    path = folder.path_of(7) / name
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    faults = [checkpoint_fault(folder, 7, part, 3) for part in range(3)]  # one part per file, and one without files
    assert any(actual is not None and actual.startswith(fault) for actual in faults)
    assert checkpoint_fault(folder, 7).startswith(fault)


@pytest.mark.parametrize("name", ["rank-0.safetensors", MANIFEST])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_a_file_that_is_a_pipe_or_a_device_is_damaged(folder, tmp_path, name, make):
    save(folder, 7)
    (folder.path_of(7) / name).unlink()
    make(folder.path_of(7) / name)
    fault = f"{name} cannot be read (it is not a regular file)"
    assert checkpoint_fault(folder, 7).removeprefix("file ") == fault
    assert fault in refusal(export, [folder.path_of(7), tmp_path / "exported"])


def rewrite(folder: CheckpointFolder, step: int, change) -> None:
    """Changes the fields of a manifest and updates its checksum."""
    manifest = folder.path_of(step) / MANIFEST
    fields = json.loads(manifest.read_text())
    fields.pop("crc32")
    fields = change(fields)
    manifest.write_text(json.dumps(fields | {"crc32": checksum(fields)} if isinstance(fields, dict) else fields))


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(b"short"), os.unlink], ids=["cut", "lost"])
def test_a_file_that_the_disk_has_lost_is_not_committed(folder, change):
    folder.begin(7)
    path = folder.partial(7) / "rank-0.safetensors"
    record = write_recorded(path, [b"content"])
    change(path)
    with pytest.raises(OSError, match=r"rank-0\.safetensors"):
        commit(folder, replace(EMPTY, step=7, files={path.name: record}))
    assert folder.steps() == []


def test_a_folder_without_a_manifest_is_damaged(folder):
    save(folder, 1)
    with pytest.raises(Damaged, match=r"manifest\.json"):
        Manifest.read(folder.path)


def test_unknown_fields_are_ignored_and_new_fields_are_optional(folder):
    save(folder, 1)
    rewrite(folder, 1, lambda fields: fields | {"colour": "red", "settings": {"lr": "1"}})
    assert checkpoint_fault(folder, 1) is None and Manifest.read(folder.path_of(1)).settings == {"lr": "1"}
    rewrite(folder, 1, lambda fields: {name: value for name, value in fields.items() if name != "settings"})
    assert checkpoint_fault(folder, 1) is None and Manifest.read(folder.path_of(1)).settings == {}


def without(*names: str):
    return lambda fields: {name: value for name, value in fields.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda fields: [fields], "manifest.json cannot be read ("),
        (lambda fields: "text", "manifest.json cannot be read ("),
        (lambda fields: None, "manifest.json cannot be read ("),
        (without("step"), "manifest.json: step: Field required"),
        (without("files"), "manifest.json: files: Field required"),
        (without("format"), "manifest.json: format: None is not"),
        (lambda fields: fields | {"format": "2"}, "manifest.json: format: '2' is not"),
        (lambda fields: fields | {"step": "7"}, "manifest.json: step: Input should be a valid integer"),
        (lambda fields: fields | {"step": True}, "manifest.json: step: "),
        (lambda fields: fields | {"step": -7}, "manifest.json: step: "),
        (lambda fields: fields | {"tokens": -1}, "manifest.json: tokens: "),
        (lambda fields: fields | {"tokens": 10**18}, "manifest.json: tokens: "),
        (lambda fields: fields | {"ranks": 0}, "manifest.json: ranks: "),
        (lambda fields: fields | {"ranks": -2}, "manifest.json: ranks: "),
        (lambda fields: fields | {"ranks": 10**18}, "manifest.json: ranks: "),
        (lambda fields: fields | {"files": {"x": {"size": -1, "crc32": 0}}}, "manifest.json: files.x.size: "),
        (lambda fields: fields | {"files": {"x": {"size": 1, "crc32": -1}}}, "manifest.json: files.x.crc32: "),
        (lambda fields: fields | {"loader": [1]}, "manifest.json: loader: Input should be"),
        (lambda fields: fields | {"files": {"x": 3}}, "manifest.json: files.x: Input should be"),
        (lambda fields: fields | {"files": {"../x": {"size": 0, "crc32": 0}}}, "manifest.json: files: '../x'"),
        (lambda fields: fields | {"files": {"..": {"size": 0, "crc32": 0}}}, "manifest.json: files: '..'"),
        (lambda fields: fields | {"files": {"": {"size": 0, "crc32": 0}}}, "manifest.json: files: ''"),
        (lambda fields: fields | {"files": {"a\0": {"size": 0, "crc32": 0}}}, r"manifest.json: files: 'a\x00'"),
        (lambda fields: fields | {"step": 8}, "manifest.json is that of step 8"),
    ],
)
def test_a_malformed_manifest_is_damaged(folder, change, fault):
    save(folder, 7)
    rewrite(folder, 7, change)
    assert checkpoint_fault(folder, 7).startswith(fault)


def test_a_manifest_that_is_nested_too_deeply_is_damaged(folder):
    save(folder, 7)
    (folder.path_of(7) / MANIFEST).write_text("[" * 100_000)
    assert checkpoint_fault(folder, 7).startswith("manifest.json cannot be read (brackets are nested too deeply")


@pytest.mark.parametrize("name", [MANIFEST, "rank-0.safetensors"])
@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM, errno.ESTALE, errno.EMFILE], ids=errno.errorcode.get)
def test_a_file_that_may_not_be_read_is_not_damaged(folder, monkeypatch, name, error):
    save(folder, 7)
    real = os.open

    def opened(path, *args, **kwargs):
        if str(path).endswith(f"step-7/{name}"):
            raise OSError(error, os.strerror(error), str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(ValueError, match=rf"step-7/{name} cannot be read \({os.strerror(error)}\), though it may be"):
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


def test_errors_name_the_first_differences():
    assert first_differences({"a": 1, "b": None}, {"b": None, "a": 1}) == ""
    assert first_differences({"a": (2, 3), "c": 0}, {"a": (3, 2), "b": None}) == (
        "a is (2, 3) there and (3, 2) here, c is 0 there and absent here, b is absent there and None here"
    )
    assert first_differences(dict.fromkeys("abcde", 1), {}).endswith("c is 1 there and absent here, and 2 more")


@pytest.mark.parametrize(
    ("steps", "keep_last", "keep_every", "kept"),
    [
        ([1, 2, 3, 4, 5, 6], 2, None, [5, 6]),
        ([1, 2, 3, 4, 5, 6], 1, 2, [2, 4, 6]),
        ([2, 4], 2, 3, [2, 4]),
        ([], 1, None, []),
    ],
)
def test_retention_keeps_the_newest_and_multiples_of_a_number(folder, steps, keep_last, keep_every, kept):
    for step in steps:
        folder.path_of(step).mkdir(parents=True)
    folder.prune(keep_last, keep_every)
    assert folder.steps() == kept


def test_retention_goes_by_numbers(folder):
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
