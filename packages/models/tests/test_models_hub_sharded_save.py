"""`save_pretrained` of sharded models: the unsharded model's files, bounded memory, errors raised on all ranks."""

import weakref
from math import prod
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from sharded_models import GPT2, LLAMA, MESHES, TIED, full, plain
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from armillary.core.testing import mesh
from armillary.models import Llama, load_pretrained
from armillary.models.hub import write

LIMIT = 700


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


SMALL_FILES = {"max_file_bytes": LIMIT}
IN_BFLOAT16 = {"dtype": torch.bfloat16, "max_file_bytes": LIMIT}
SAVES = {
    4: [
        *((name, LLAMA, SMALL_FILES) for name in MESHES if prod(MESHES[name].values()) == 4),
        *((name, GPT2, SMALL_FILES) for name in ("tp 4", "fsdp 2 tp 2")),
        ("fsdp 2 tp 2", TIED, {}),
        ("fsdp 2 tp 2", TIED, IN_BFLOAT16),
    ],
    8: [("hsdp 2x2 tp 2", GPT2, SMALL_FILES), ("fsdp 4 tp 2", LLAMA, SMALL_FILES)],
}
"""(mesh, model, options) by number of ranks."""


def save(cases, folder: str) -> None:
    for i, (name, config, options) in enumerate(cases):
        full(config, MESHES[name]).save_pretrained(f"{folder}/sharded {i}", **options)


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.long)])
def test_files_of_a_sharded_model_equal_the_unsharded_models(worlds, tmp_path, ranks):
    worlds(ranks).run(save, SAVES[ranks], str(tmp_path))
    for i, (name, config, options) in enumerate(SAVES[ranks]):
        plain(config).save_pretrained(tmp_path / f"whole {i}", **options)
        assert contents(tmp_path / f"sharded {i}") == contents(tmp_path / f"whole {i}"), (name, config)
        assert len(contents(tmp_path / f"whole {i}")) > 5 or options != SMALL_FILES


def save_and_load_after_evaluating(folder: str) -> bool:
    model = full(LLAMA, {"shard": 4}, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        logits = model(ids)  # leaves the root module's parameters gathered, in bfloat16
    unsharded = not isinstance(model.lm_head.weight, DTensor)
    model.save_pretrained(folder, max_file_bytes=LIMIT)
    with torch.no_grad():
        model(ids)
        for parameter in model.parameters():
            parameter.zero_()
        load_pretrained(model, folder)
        return unsharded and torch.equal(model(ids), logits)


def test_a_model_after_evaluation_is_saved_and_filled_in_full_precision(worlds, tmp_path):
    assert all(worlds(4).run(save_and_load_after_evaluating, str(tmp_path / "sharded")))
    plain(LLAMA).save_pretrained(tmp_path / "whole", max_file_bytes=LIMIT)
    assert contents(tmp_path / "sharded") == contents(tmp_path / "whole")


class LiveBytes:
    """Peak bytes of the gathered tensors alive at a time."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}
        self.peak = 0

    def add(self, x: torch.Tensor) -> torch.Tensor:
        if id(x) not in self.alive:
            weakref.finalize(x, self.alive.pop, id(x))
        self.alive[id(x)] = x.nbytes
        self.peak = max(self.peak, sum(self.alive.values()))
        return x


def peak_while_saving(config, folder: str) -> tuple[int, list[str]]:
    model, live_bytes, written = full(config, {"shard": 4}), LiveBytes(), []
    full_values, assemble, write_partial = write.full_values, write.assemble, write.write_partial

    def gather_and_count(tensor, dtype):
        return live_bytes.add(full_values(tensor, dtype))

    def assemble_and_count(file_tensor, is_kept):
        values = assemble(file_tensor, is_kept)
        return values if values is None else live_bytes.add(values)

    def write_and_list(path, pieces):
        if path.suffix == ".safetensors":
            written.append(path.name)
        write_partial(path, pieces)

    with (
        patch.object(write, "full_values", gather_and_count),
        patch.object(write, "assemble", assemble_and_count),
        patch.object(write, "write_partial", write_and_list),
    ):
        model.save_pretrained(folder, max_file_bytes=LIMIT)
    return live_bytes.peak, written


def test_all_ranks_write_and_hold_at_most_one_file_and_one_tensor(worlds, tmp_path):
    answers = worlds(4).run(peak_while_saving, GPT2, str(tmp_path))
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert [written for _, written in answers] == [names[rank::4] for rank in range(4)]
    largest = max(parameter.nbytes for parameter in plain(GPT2).parameters())
    for peak, _ in answers:
        assert 0 < peak <= LIMIT + largest


def error_of_a_full_disk(folder: str, rank: int, name: str) -> str:
    """The error on this rank when `rank` cannot write the file of that name."""
    write_partial = write.write_partial

    def full_disk(path, pieces):
        write_partial(path, pieces)
        if dist.get_rank() == rank and path.name.startswith(name):
            raise OSError("disk full")

    model = full(LLAMA, {"shard": 4})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    with patch.object(write, "write_partial", full_disk), pytest.raises(OSError) as error:
        model.save_pretrained(folder, max_file_bytes=500)
    dist.barrier()
    return str(error.value)


@pytest.mark.parametrize("rank, name", [(1, "model-00002"), (2, "model-00007"), (0, "config.json")])
def test_an_error_on_one_rank_is_raised_on_all_and_the_old_files_stay(worlds, tmp_path, rank, name):
    plain(LLAMA).save_pretrained(tmp_path, max_file_bytes=LIMIT)
    before = contents(tmp_path)
    answers = worlds(4).run(error_of_a_full_disk, str(tmp_path), rank, name)
    assert answers[rank] == "disk full"
    message = f"nothing was saved: rank {rank} had OSError: disk full"
    assert [answer for i, answer in enumerate(answers) if i != rank] == [message] * 3
    assert contents(tmp_path) == before


def save_on_one_rank(folder: str) -> None:
    if mesh(shard=4)["shard"].get_local_rank() == 2:
        plain(LLAMA).save_pretrained(folder)


def test_one_rank_saves_an_unsharded_model(worlds, tmp_path):
    worlds(4).run(save_on_one_rank, str(tmp_path))
    model = Llama.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain(LLAMA).parameters(), strict=True))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def error_of_a_missing_source(folder: str) -> str:
    """The error on this rank when the tokenizer's folder is missing on rank 1."""
    source = f"{folder}/nowhere" if dist.get_rank() == 1 else folder
    with pytest.raises((OSError, ValueError)) as error:
        full(LLAMA, {"shard": 2}).save_pretrained(f"{folder}/new", source=source)
    return str(error.value)


def test_a_source_missing_on_one_rank_is_refused_on_all(worlds, tmp_path):
    messages = worlds(2).run(error_of_a_missing_source, str(tmp_path))
    assert "rank 1 " in messages[0]
    assert "is not a folder" in messages[1]
