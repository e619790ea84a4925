"""Tensor files: reading with torch, unsupported states, and manipulated headers."""

import io
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from armillary.core.testing import mesh
from armillary.train.checkpoint.checkpoints import SavedCheckpoint, commit
from armillary.train.checkpoint.output_folder import CheckpointFolder
from armillary.train.checkpoint.tensors_and_manifest import (
    Damaged,
    FileRecord,
    Manifest,
    SavedTensors,
    describe_tensor,
    save_tensors,
)
from armillary.train.internal import Ranks

FILE = "rank-0.safetensors"
TENSORS = {
    "a": torch.arange(16.0).reshape(4, 4),
    "b": torch.arange(3).to(torch.bfloat16),
    "c": torch.tensor(7),
    "d": torch.empty(0, 2),
    "e": torch.arange(12.0, dtype=torch.float64).reshape(3, 4).T,
    "f": torch.arange(5, dtype=torch.uint8),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint of `TENSORS`, shared by read-only tests."""
    folder = tmp_path_factory.mktemp("saved")
    save_tensors(folder, {"model": TENSORS})
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A writable copy of the checkpoint."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def same(tensors: dict[str, torch.Tensor]) -> bool:
    equal = (torch.equal(tensors[name], x) and tensors[name].dtype == x.dtype for name, x in TENSORS.items())
    return tensors.keys() == TENSORS.keys() and all(equal)


def test_tensors_are_restored_equally_and_torch_reads_them(saved):
    assert same(SavedTensors(saved, [FILE]).read("model"))
    into = {"model": {name: torch.empty_like(x) for name, x in TENSORS.items()}}
    dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(saved)), no_dist=True)
    assert same(into["model"])
    descriptions = SavedTensors(saved, [FILE]).describe("model.")
    assert descriptions == {f"model.{name}": describe_tensor(x.shape, x.dtype) for name, x in TENSORS.items()}
    assert descriptions["model.b"] == "(3,) of bfloat16"
    assert SavedTensors(saved, [FILE]).read("model", torch.float32)["b"].dtype == torch.float32


def test_many_tensors_are_split_into_files_and_others_in_the_folder_are_not_touched(tmp_path, monkeypatch):
    monkeypatch.setattr("armillary.train.checkpoint.tensors_and_manifest.MAX_FILE_BYTES", 70)
    files = save_tensors(tmp_path, {"model": TENSORS})
    assert files == {name: FileRecord.of_file(tmp_path / name) for name in os.listdir(tmp_path)}
    assert files.keys() == {FILE, *(f"rank-0-{number}.safetensors" for number in (1, 2))}
    (tmp_path / "rank-1.safetensors").write_bytes(b"text")
    assert same(SavedTensors(tmp_path, files).read("model"))


def test_an_unsupported_state_is_refused_before_writing(tmp_path):
    for state, named in (
        ({"model": TENSORS, "lr": 0.1}, "lr"),
        ({"model": TENSORS, "note": io.BytesIO(b"text")}, "note"),
        ({"model": {"z": torch.zeros(2, dtype=torch.complex64)}}, r"model\.z"),
    ):
        with pytest.raises(ValueError, match=rf"^{named} "):
            save_tensors(tmp_path, state)
    assert not os.listdir(tmp_path)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the header of a file. `change` edits the header dict in place or returns a new header."""
    content = (folder / FILE).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    header = header if (other := change(header)) is None else other
    if isinstance(header, dict) and isinstance(header.get("__metadata__", {}).get("DCP_SHARDING_INFO"), dict):
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(header["__metadata__"]["DCP_SHARDING_INFO"])
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / FILE).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def entry(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["model.a"].update(fields)


def offsets(*numbers: Any, name: str = "model.a") -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"]["DCP_SHARDING_INFO"].update({name: {"saved_offsets": [*numbers]}})


def sharding(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update(DCP_SHARDING_INFO=value)


def payload(header: dict[str, Any]) -> bytes:
    return pickle.dumps((open, ("executed", "w")))


INVALID = [
    entry(shape=[4, 5]),
    entry(shape=[2**62, 2**62]),
    entry(shape=[2**70]),
    entry(shape=[-1, -16]),
    entry(shape="text"),
    entry(dtype="F128"),
    entry(data_offsets=[0, 2**40]),
    entry(data_offsets=[-64, 0]),
    entry(data_offsets=[1, 65]),
    offsets(2, 0),
    offsets(-1, 0),
    offsets(0),
    offsets(2**70, 0),
    offsets(0.5, 0),
    offsets(None, None),
    sharding("{}"),
    sharding("[]"),
    sharding("[" * 100_000),
    lambda header: [header],
    lambda header: b"",
    lambda header: b"{}",
    lambda header: b"\xff\xfe",
    lambda header: b"[" * 100_000,
    payload,
]


@pytest.mark.parametrize("change", INVALID, ids=range(len(INVALID)))
def test_a_manipulated_header_is_refused_in_one_line(folder, change, monkeypatch):
    monkeypatch.chdir(folder)
    rewrite(folder, change)
    with pytest.raises(Damaged) as error:
        SavedTensors(folder, [FILE]).read("model")
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert os.listdir(folder) == [FILE]


def test_a_truncated_file_and_one_of_another_format_are_refused(folder):
    content = (folder / FILE).read_bytes()
    for other in (
        *(content[:size] for size in (0, 1, 8, 50, len(content) // 2, len(content) - 1)),
        b"\xff" * 8,
        (2**62).to_bytes(8, "little") + b"{}",
        pickle.dumps({"model": 1}) * 10,
    ):
        (folder / FILE).write_bytes(other)
        with pytest.raises(Damaged):
            SavedTensors(folder, [FILE]).read("model")


def test_files_that_overlap_or_are_missing_are_refused(folder):
    with pytest.raises(FileNotFoundError):
        SavedTensors(folder, [FILE, "rank-1.safetensors"])
    shutil.copyfile(folder / FILE, folder / "rank-1.safetensors")
    with pytest.raises(Damaged, match=r"model\."):
        SavedTensors(folder, [FILE, "rank-1.safetensors"])


def test_chunks_of_several_dtypes_are_refused(tmp_path):
    """torch takes the dtype of the first chunk, so that chunks of other files would be converted from another dtype."""
    for rank, dtype in enumerate(("F32", "I32")):
        entry = {"dtype": dtype, "shape": [2], "data_offsets": [0, 8]}
        sharding = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps({"model.a": {"saved_offsets": [2 * rank]}})}}
        text = json.dumps({"model.a": entry} | sharding).encode()
        (tmp_path / f"rank-{rank}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(Damaged, match=r"model\.a: chunks of"):
        SavedTensors(tmp_path, [FILE, "rank-1.safetensors"])


def test_a_tensor_larger_than_memory_is_named(tmp_path):
    """Uses a sparse file, which needs no disk space."""
    size = 2**42
    text = json.dumps({"model.a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        try:
            file.truncate(8 + len(text) + size)
        except OSError:
            pytest.skip("the file system has no files of this size")
    with pytest.raises(ValueError, match="memory"):
        SavedTensors(tmp_path, [FILE]).read("model")


# -- other numbers of ranks -------------------------------------------------------------------------------------------


def values(*shape: int) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).reshape(shape)


def sharded_state(shard: int, tp: int, zeros: bool) -> dict[str, Any]:
    """FSDP2 over tensor parallelism with uneven rows, and a tensor with fewer rows than ranks."""
    axes = mesh(shard=shard, tp=tp)
    model = torch.nn.Sequential(torch.nn.Linear(3, 7))
    with torch.no_grad():
        model[0].weight.copy_(values(7, 3))
        model[0].bias.copy_(values(7))
    parallelize_module(model, axes["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=axes["shard"])
    state = dict(model.state_dict()) | {"short": distribute_tensor(values(2, 3), axes["shard"], [Shard(0)])}
    return {name: torch.zeros_like(x) if zeros else x for name, x in state.items()}


def save_by_all(folder: Path, state: dict[str, Any]) -> None:
    ranks = Ranks(timedelta(minutes=5))
    try:
        files = save_tensors(folder, state, ranks)
    finally:
        ranks.close()
    assert files == {name: FileRecord.of_file(folder / name) for name in files}


def save_sharded(folder: Path, shard: int, tp: int) -> None:
    save_by_all(folder, {"model": sharded_state(shard, tp, zeros=False)})


def load_sharded(folder: Path, files: list[str], shard: int, tp: int) -> dict[str, torch.Tensor]:
    state = sharded_state(shard, tp, zeros=True)
    SavedTensors(folder, files).fill({"model": state})
    tensors = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()}
    dist.barrier()
    return tensors


@pytest.mark.parametrize(("shard", "tp"), [(2, 2), (1, 4)])
def test_chunks_of_any_mesh_are_read_on_any_other(worlds, tmp_path, shard, tp):
    worlds(4).run(save_sharded, tmp_path, shard, tp)
    files = sorted(os.listdir(tmp_path))
    assert files == [f"rank-{rank}.safetensors" for rank in range(4)]
    expected = {"0.weight": values(7, 3), "0.bias": values(7), "short": values(2, 3)}
    for other in [(2, 1), (1, 2)]:
        for tensors in worlds(2).run(load_sharded, tmp_path, files, *other):
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    full = SavedTensors(tmp_path, files).read("model")
    assert all(torch.equal(full[name], expected[name]) for name in expected)


def save_without_a_shard(folder: Path) -> str:
    state = sharded_state(2, 1, zeros=False)
    if dist.get_rank() == 1:
        del state["short"]
    with pytest.raises(ValueError) as error:
        save_by_all(folder, state)
    return str(error.value)


def test_a_tensor_without_all_of_its_shards_is_refused_on_every_rank(worlds, tmp_path):
    assert worlds(2).run(save_without_a_shard, tmp_path) == ["short: 3 elements of a tensor of (2, 3)"] * 2
    assert not os.listdir(tmp_path)


def save_replicated(folder: Path) -> None:
    tensors = {f"{i}": distribute_tensor(values(4), mesh(shard=2)["shard"], [Replicate()]) for i in range(4)}
    save_by_all(folder, {"model": tensors, "random": {f"rank-{dist.get_rank()}": values(2)}})


def test_replicated_tensors_are_written_once_by_all_ranks_alike(worlds, tmp_path):
    worlds(2).run(save_replicated, tmp_path)
    sizes = [(tmp_path / f"rank-{rank}.safetensors").stat().st_size for rank in range(2)]
    chunks = SavedTensors(tmp_path, os.listdir(tmp_path)).chunks
    assert sizes[0] == sizes[1] and [len(chunks) for chunks in chunks.values()] == [3, 3]


def opened_through(paths: list[Path]) -> bool:
    ranks = Ranks(timedelta(minutes=5))
    folder = CheckpointFolder(paths[ranks.rank])
    checkpoint = SavedCheckpoint.open(folder, 1, ranks)
    ranks.close()
    return checkpoint.path == checkpoint.tensors.folder == folder.path_of(1)


def test_hosts_may_mount_the_folder_in_different_places(worlds, saved, tmp_path):
    folder = CheckpointFolder(tmp_path / "first")
    folder.begin(1)
    shutil.copyfile(saved / FILE, folder.partial(1) / FILE)
    files = {FILE: FileRecord.of_file(saved / FILE)}
    commit(folder, Manifest(step=1, ranks=1, tokens=0, loader={}, model={}, time="", files=files))
    (tmp_path / "second").symlink_to(tmp_path / "first")
    assert worlds(2).run(opened_through, [tmp_path / "first", tmp_path / "second"]) == [True, True]
