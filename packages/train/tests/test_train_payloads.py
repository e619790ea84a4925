"""A checkpoint is data: whatever stands in a file of it, going on and exporting run none of it."""

import errno
import io
import json
import os
import pickle
import resource
import shutil
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata

import armillary.train
from armillary.models import Llama
from armillary.train import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    ValidationConfig,
    prepare,
    process_group,
    train,
)
from armillary.train.checkpoint.export import main as export
from armillary.train.checkpoint.manifest import MANIFEST, Manifest
from armillary.train.checkpoint.state import training_state
from armillary.train.runtime.checkpoint.metadata import METADATA, read_metadata
from armillary.train.runtime.checkpoint.writer import read_back

TEXT = (Path(armillary.train.__file__).parent,)
"""What is trained on: all of Python's own text would take each rank longer to read than it trains."""
CONFIG = Config(
    model=ModelConfig(dim=32, layers=1, heads=4, kv_heads=2, hidden_dim=48),
    parallel=ParallelConfig(),
    data=DataConfig(path=TEXT, sequence_length=60, global_batch_size=1),
    validation=ValidationConfig(every=20, batches=1),
    log=LogConfig(plot=False),
    train=TrainConfig(steps=1, device="cpu"),
)


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def at(folder: Path, steps: int = 1) -> Config:
    return replace(CONFIG, train=replace(CONFIG.train, output=folder, steps=steps))


def trained(config: Config) -> str:
    """What it printed, or why it was refused."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), process_group(config) as device:
            train(prepare(config, device))
    except ValueError as error:
        return f"refused: {error}"
    return printed.getvalue()


@pytest.fixture(scope="module")
def checkpoint(worlds, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    worlds(1).run(trained, at(folder))
    return folder


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "executed"


def zipped(value: object) -> bytes:
    """As `torch.save` has it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def payloads(name: str, marker: Path, place: Path) -> dict[str, dict[str, bytes]]:
    """Contents for files of a checkpoint that run something when they are unpickled."""
    padding = torch.zeros(2**17, dtype=torch.uint8)  # as many bytes as any tensor has
    contents = {"pickle": pickle.dumps((Payload(marker), bytes(padding))), "zip": zipped((Payload(marker), padding))}
    found = {kind: {name: content} for kind, content in contents.items()}
    with (place / METADATA).open("rb") as file:
        metadata = pickle.load(file)
    names = metadata.state_dict_metadata
    changed = {
        "in a field": {"planner_data": Payload(marker)},
        "in an entry": {"state_dict_metadata": names | {"model.x": Payload(marker)}},
        "no tensors": {"state_dict_metadata": dict.fromkeys(names, BytesStorageMetadata())},
    }
    for kind, fields in changed.items() if name == METADATA else ():
        found[kind] = {METADATA: pickle.dumps(replace(metadata, **fields))}
    for kind, content in contents.items() if name.endswith(".distcp") else ():  # in place of each tensor
        size, indices = len(content), list(metadata.storage_data)
        stored = {index: _StorageInfo(name, i * size, size) for i, index in enumerate(indices)}
        files = {METADATA: pickle.dumps(replace(metadata, storage_data=stored)), name: content * len(indices)}
        found[f"{kind} of tensors"] = files
    return found


def poison(place: Path, files: dict[str, bytes]) -> None:
    """Puts them there, and has the manifest agree."""
    for name, content in files.items():
        (place / name).write_bytes(content)
    if MANIFEST not in files:
        manifest = Manifest.read(place)
        replace(manifest, files=manifest.files | {name: read_back(place / name) for name in files}).write(place)


def exported(place: Path, folder: Path) -> str:
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            export([str(place), str(folder)])
    except SystemExit as stop:
        assert stop.code == 2
    return said.getvalue()


@pytest.mark.parametrize("name", [MANIFEST, METADATA, "__0_0.distcp"])
def test_a_payload_in_a_file_of_a_checkpoint_is_not_run(worlds, checkpoint, tmp_path, marker, name):
    original = checkpoint / "checkpoint/step-1"
    assert {path.name for path in original.iterdir()} == {MANIFEST, METADATA, "__0_0.distcp"}
    for kind, files in payloads(name, marker, original).items():
        output = tmp_path / kind
        place = output / "checkpoint/step-1"
        shutil.copytree(original, place)
        poison(place, files)
        (said,) = worlds(1).run(trained, at(output, steps=2))
        assert said.startswith("refused: ") and str(output) in said and "\n" not in said, (kind, said)
        said = exported(place, tmp_path / f"{kind}-hf")
        assert said.startswith(f"armillary-export: {place}: ") and said.count("\n") == 1, (kind, said)
        assert not marker.exists(), kind


def test_files_beside_checkpoints_run_nothing_either(worlds, checkpoint, tmp_path, marker):
    names = [str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()]
    beside = [name for name in names if not name.startswith("checkpoint")]
    assert len(beside) == 3  # config.json, metrics.jsonl, lock/1.released
    shutil.copytree(checkpoint, tmp_path / "run")
    for name in [*beside, "lock/7.held", "checkpoint/.metadata", "wandb-id"]:
        (tmp_path / "run" / name).write_bytes(pickle.dumps(Payload(marker)))
    (tmp_path / "run/lock/7.held").unlink()
    (said,) = worlds(1).run(trained, at(tmp_path / "run", steps=2))
    assert "resuming from" in said and not marker.exists()


def with_payloads_as_torch_saves_them(config: Config, marker: Path) -> None:
    """What is not a tensor, pickled by DCP itself, as older checkpoints had random states."""
    place = config.train.output / "checkpoint/step-1"
    with process_group(config) as device:
        run = prepare(config, device)
        state = training_state(run)
        state["optimizer"]["param_groups"][0]["note"] = Payload(marker)
        dcp.save({**state, "step": Payload(marker), "random": {"rank-0": Payload(marker)}}, checkpoint_id=place)
        files = {path.name: read_back(path) for path in place.iterdir()}
        rows = run.training.state_dict()
        model = json.loads((place.parents[1] / "model.json").read_text())
    Manifest(1, 1, 60, rows, model, "", files).write(place)


def test_what_torch_has_pickled_beside_tensors_is_not_read(worlds, checkpoint, tmp_path, marker):
    model = Manifest.read(checkpoint / "checkpoint/step-1").model
    (tmp_path / "model.json").write_text(json.dumps(model))
    worlds(1).run(with_payloads_as_torch_saves_them, at(tmp_path), marker)
    assert exported(tmp_path / "checkpoint/step-1", tmp_path / "hf") == ""
    (said,) = worlds(1).run(trained, at(tmp_path, steps=2))
    assert "resuming from" in said and not marker.exists()


def test_a_payload_in_a_file_of_an_export_is_not_run(checkpoint, tmp_path, marker):
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


def with_size(metadata, size: tuple[int, ...]):
    """Another size of every tensor, in one chunk."""
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))
    entries = metadata.state_dict_metadata
    return replace(
        metadata, state_dict_metadata={n: replace(x, size=chunk.sizes, chunks=[chunk]) for n, x in entries.items()}
    )


def with_file(metadata, name: str):
    """Another file for every tensor."""
    stored = {index: replace(info, relative_path=name) for index, info in metadata.storage_data.items()}
    return replace(metadata, storage_data=stored)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda metadata: with_size(metadata, (2**70,)), str(2**70)),
        (lambda metadata: with_size(metadata, (2**40, 2**10)), "model."),
        (lambda metadata: with_file(metadata, ".."), "relative_path='..'"),
        (lambda metadata: with_file(metadata, ""), "relative_path=''"),
        (lambda metadata: with_file(metadata, "absent.distcp"), "absent.distcp"),
    ],
    ids=range(5),
)
def test_metadata_of_sizes_and_files_that_cannot_be_is_refused_in_one_line(worlds, checkpoint, tmp_path, change, named):
    place = shutil.copytree(checkpoint, tmp_path / "run") / "checkpoint/step-1"
    metadata = change(dcp.FileSystemReader(place).read_metadata())
    poison(place, {METADATA: pickle.dumps(metadata)})
    said = exported(place, tmp_path / "hf")
    assert said.startswith(f"armillary-export: {place}: .metadata ") and said.count("\n") == 1 and named in said
    (said,) = worlds(1).run(trained, at(tmp_path / "run", steps=2))
    assert said.startswith("refused: ") and named in said and "\n" not in said


@pytest.mark.parametrize("fields", [{"num_hidden_layers": 10**6}, {"hidden_size": 64}, {"vocab_size": "many"}], ids=str)
def test_a_manifest_of_another_model_than_was_saved_is_not_exported(checkpoint, tmp_path, fields):
    place = shutil.copytree(checkpoint / "checkpoint/step-1", tmp_path / "step-1")
    manifest = Manifest.read(place)
    replace(manifest, model=manifest.model | fields).write(place)
    said = exported(place, tmp_path / "hf")
    assert said.startswith(f"armillary-export: {place}/manifest.json: model: ") and said.count("\n") == 1


def test_an_export_to_a_full_disk_names_the_file(checkpoint, tmp_path):
    """A limit of this process's files instead: torch, safetensors and Python fail alike."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        said = exported(checkpoint / "checkpoint/step-1", tmp_path / "hf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert said == f"armillary-export: {tmp_path}/hf/model.safetensors: {os.strerror(errno.EFBIG)}\n"
    assert list((tmp_path / "hf").iterdir()) == []


def test_metadata_of_a_checkpoint_is_what_torch_reads(checkpoint):
    place = checkpoint / "checkpoint/step-1"
    ours, theirs = read_metadata(place), dcp.FileSystemReader(place).read_metadata()
    assert ours.storage_data == theirs.storage_data and len(ours.storage_data) > 20
    for name, entry in theirs.state_dict_metadata.items():
        found = ours.state_dict_metadata[name]
        assert (found.size, found.chunks) == (entry.size, entry.chunks)
        assert found.properties.dtype == entry.properties.dtype
