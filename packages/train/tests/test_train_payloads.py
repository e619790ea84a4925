"""Resuming and exporting never execute the contents of a checkpoint."""

import errno
import io
import json
import os
import pickle
import shutil
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_runs import SMALL, file_size_limit, train_small
from training_runs import at as placed

from armillary.models import Llama
from armillary.train import Config, ParallelConfig
from armillary.train.checkpoint.export import main as export
from armillary.train.checkpoint.tensors_and_manifest import MANIFEST, FileRecord, Manifest
from armillary.train.generate import Generate
from armillary.train.generate import run as generate

FILE = "rank-0.safetensors"
CONFIG = replace(SMALL, parallel=ParallelConfig(), data=replace(SMALL.data, global_batch_size=1))


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def at(folder: Path, steps: int = 1) -> Config:
    return placed(CONFIG, folder, steps=steps)


def trained(config: Config) -> str:
    """Returns the output of a run, or the reason of its refusal."""
    try:
        return train_small(config)[1]
    except ValueError as error:
        return f"refused: {error}"


@pytest.fixture(scope="module")
def checkpoint(worlds, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    worlds(1).run(trained, at(folder))
    return folder


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "executed"


def zipped(value: object) -> bytes:
    """Returns the bytes of a `torch.save` file."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def payloads(name: str, marker: Path, place: Path) -> dict[str, dict[str, bytes]]:
    """Returns file contents that execute code when they are unpickled."""
    contents = {"pickle": pickle.dumps(Payload(marker)), "zip": zipped((Payload(marker), torch.zeros(2**17)))}
    actual = {kind: {name: content} for kind, content in contents.items()}
    if name != MANIFEST:
        full = (place / name).read_bytes()
        start = 8 + int.from_bytes(full[:8], "little")
        for kind, content in contents.items():
            actual[f"{kind} as a header"] = {name: len(content).to_bytes(8, "little") + content + full[start:]}
    return actual


def poison(place: Path, files: dict[str, bytes]) -> None:
    """Replaces files of a checkpoint and updates their records in the manifest."""
    for name, content in files.items():
        (place / name).write_bytes(content)
    if MANIFEST not in files:
        manifest = Manifest.read(place)
        replace(manifest, files=manifest.files | {name: FileRecord.of_file(place / name) for name in files}).write(
            place
        )


def exported(place: Path, folder: Path) -> str:
    messages = io.StringIO()
    try:
        with redirect_stderr(messages):
            export([str(place), str(folder)])
    except SystemExit as stop:
        assert stop.code == 2
    return messages.getvalue()


@pytest.mark.parametrize("name", [MANIFEST, FILE])
def test_a_payload_in_a_checkpoint_file_is_not_executed(worlds, checkpoint, tmp_path, marker, name):
    original = checkpoint / "checkpoint/step-1"
    assert {path.name for path in original.iterdir()} == {MANIFEST, FILE}
    for kind, files in payloads(name, marker, original).items():
        output = tmp_path / kind
        place = output / "checkpoint/step-1"
        shutil.copytree(original, place)
        poison(place, files)
        (messages,) = worlds(1).run(trained, at(output, steps=2))
        assert messages.startswith("refused: ") and str(output) in messages and "\n" not in messages, (kind, messages)
        messages = exported(place, tmp_path / f"{kind}-hf")
        assert messages.startswith(f"armillary-export: {place}: ") and messages.count("\n") == 1, (kind, messages)
        assert not marker.exists(), kind


def test_payloads_beside_checkpoints_are_not_executed(worlds, checkpoint, tmp_path, marker):
    names = [str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()]
    other_files = [name for name in names if not name.startswith("checkpoint")]
    assert len(other_files) == 3  # config.json, metrics.jsonl, lock/1.released
    shutil.copytree(checkpoint, tmp_path / "run")
    for name in [*other_files, "lock/7.held", "checkpoint/.metadata", "wandb-id"]:
        (tmp_path / "run" / name).write_bytes(pickle.dumps(Payload(marker)))
    (tmp_path / "run/lock/7.held").unlink()
    (messages,) = worlds(1).run(trained, at(tmp_path / "run", steps=2))
    assert "resuming from" in messages and not marker.exists()


def test_a_payload_in_an_exported_file_is_not_executed(checkpoint, tmp_path, marker):
    place = checkpoint / "checkpoint/step-1"
    assert exported(place, tmp_path / "hf") == ""
    names = [path.name for path in (tmp_path / "hf").iterdir()]
    for name in [*names, "pytorch_model.bin", "model.safetensors.index.json"]:
        folder = tmp_path / f"with {name}"
        shutil.copytree(tmp_path / "hf", folder)
        if name not in names:
            (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(pickle.dumps(Payload(marker)))
        with pytest.raises(ValueError):
            Llama.from_pretrained(folder)
        assert not marker.exists(), name


def with_dtype(full: bytes, prefix: str, dtype: str) -> bytes:
    """Returns a safetensors file whose header says `dtype` for each F32 tensor with this prefix."""
    size = int.from_bytes(full[:8], "little")
    header = json.loads(full[8 : 8 + size])
    for name, entry in header.items():
        if name.startswith(prefix) and entry["dtype"] == "F32":
            entry["dtype"] = dtype
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + full[8 + size :]


def generated(source: Path) -> str:
    """Returns the reason why `armillary-generate` refuses a checkpoint."""
    with pytest.raises(ValueError) as error:
        generate(Generate(source, ("a",), tokens=1, device="cpu"))
    return str(error.value)


@pytest.mark.parametrize("prefix", ["model.", "optimizer.state.lm_head.weight.exp_avg"])
def test_a_header_with_another_dtype_of_equal_size_is_refused(worlds, checkpoint, tmp_path, prefix):
    run = shutil.copytree(checkpoint, tmp_path / "run")
    place = run / "checkpoint/step-1"
    poison(place, {FILE: with_dtype((place / FILE).read_bytes(), prefix, "I32")})
    (messages,) = worlds(1).run(trained, at(run, steps=2))
    assert messages.startswith("refused: ") and f"{prefix}" in messages and "of int32 there" in messages
    if prefix.startswith("model."):
        assert "of int32 there" in exported(place, tmp_path / "hf")
        assert "of int32 there" in worlds(1).run(generated, run)[0]


def test_values_of_a_manifest_are_printed_without_control_characters(worlds, checkpoint, tmp_path):
    run = shutil.copytree(checkpoint, tmp_path / "run")
    manifest = Manifest.read(run / "checkpoint/step-1")
    settings = manifest.settings | {"optimizer.lr": "\x1b[31m1\ntrained \x9b2J"}
    replace(manifest, settings=settings).write(run / "checkpoint/step-1")
    (messages,) = worlds(1).run(trained, at(run, steps=2))
    assert "optimizer.lr  " in messages and r"\x1b[31m1 trained \x9b2J -> 0.003" in messages
    assert not {"\x1b", "\x9b"} & set(messages)


def test_an_export_to_a_full_disk_names_the_file(checkpoint, tmp_path):
    """A file size limit stands for a full disk: torch, safetensors and Python fail equally."""
    with file_size_limit(1000):
        messages = exported(checkpoint / "checkpoint/step-1", tmp_path / "hf")
    assert messages == f"armillary-export: {tmp_path}/hf.partial/model.safetensors: {os.strerror(errno.EFBIG)}\n"
    assert not list(tmp_path.glob("hf*"))
