"""Sharded models and weight folders: each rank reads only its shards, and all ranks write the unsharded files."""

import weakref
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from sharded_models import FEW, GPT2, LLAMA, TIED, empty, full, model_of, plain
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from armillary.core import CommLedger
from armillary.core.testing import mesh
from armillary.models import GPT, GPTConfig, LinearScaling, Llama, LlamaConfig, initialize, load_pretrained
from armillary.models.hub import write
from armillary.models.hub.safetensors import TensorEntry

Config = LlamaConfig | GPTConfig
LIMIT = 700
SMALL_FILES = {"max_file_bytes": LIMIT}


def local(x: torch.Tensor) -> torch.Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def full_tensor(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def equals(model: Llama | GPT, expected: Llama | GPT, dtype: torch.dtype = torch.float32) -> bool:
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return all(torch.equal(full_tensor(a), b.to(dtype)) for a, b in pairs)


# -- loading ----------------------------------------------------------------------------------------------------------

FOLDERS = {LLAMA: "llama", TIED: "tied", FEW: "few", GPT2: "gpt2"}
LOADS = [
    (LLAMA, {"shard": 2, "ring": 2}, torch.float32),
    (TIED, {"replicate": 2, "shard": 2}, torch.float32),
    (LLAMA, {"shard": 4}, torch.bfloat16),
    (FEW, {"shard": 2, "tp": 2}, torch.float32),
    (GPT2, {"ring": 1, "tp": 4}, torch.float32),
    (GPT2, {"shard": 2, "tp": 2}, torch.float32),
]


def load_and_initialize(folder: str) -> None:
    for config, axes, dtype in LOADS:
        model, expected = empty(config, axes, dtype), full(config, axes)
        pieces = []

        def read_and_keep(entry, box, read=TensorEntry.read, pieces=pieces):
            pieces.append(read(entry, box))
            return pieces[-1]

        with patch.object(TensorEntry, "read", read_and_keep), CommLedger() as ledger:
            load_pretrained(model, f"{folder}/{FOLDERS[config]}")
        assert ledger.bytes() == 0
        for (name, actual), right in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(local(actual), local(right).to(dtype)), (name, axes)
        assert equals(model, plain(config), dtype), (config, axes)
        local_count = sum(local(parameter).numel() for parameter in model.parameters())
        assert sum(piece.numel() for piece in pieces) == local_count, (config, axes)
        initialize(model, seed=0)
        initialize(expected := model_of(config), seed=0)
        assert equals(model, expected, dtype), (config, axes)
    # Without a strided shard, FSDP over tensor parallelism would not be tried.
    placements = empty(FEW, {"shard": 2, "tp": 2}).model.layers[0].self_attn.q_proj.weight.placements
    assert "_StridedShard(dim=0, sf=2), Shard(dim=0)" in str(placements)


def error_of_a_truncated_file(folder: str) -> str:
    model = empty(LLAMA, {"shard": 4})
    with pytest.raises(ValueError) as error:
        load_pretrained(model, folder)
    assert not any(local(parameter).any() for parameter in model.parameters())
    return str(error.value)


def test_weights_are_loaded_and_initialized_equally_on_every_mesh_and_a_truncated_file_is_refused(worlds, tmp_path):
    """Each rank reads only its shards, and initial weights do not depend on the mesh."""
    for config, name in FOLDERS.items():
        plain(config).save_pretrained(tmp_path / name, **SMALL_FILES)
    worlds(4).run(load_and_initialize, str(tmp_path))
    last = sorted((tmp_path / "llama").glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    messages = worlds(4).run(error_of_a_truncated_file, str(tmp_path / "llama"))
    assert all(last.name in message for message in messages)


# -- saving -----------------------------------------------------------------------------------------------------------

SAVES = [
    (LLAMA, {"shard": 2, "ring": 2}, SMALL_FILES),
    (LLAMA, {"replicate": 2, "shard": 2}, SMALL_FILES),
    (GPT2, {"ring": 1, "tp": 4}, SMALL_FILES),
    (GPT2, {"shard": 2, "tp": 2}, SMALL_FILES),
    (replace(FEW, tied_embeddings=True), {"shard": 2, "tp": 2}, {"dtype": torch.bfloat16, "max_file_bytes": LIMIT}),
]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def save(folder: str) -> None:
    for i, (config, axes, options) in enumerate(SAVES):
        full(config, axes).save_pretrained(f"{folder}/sharded {i}", **options)
    if mesh(shard=4)["shard"].get_local_rank() == 2:
        plain(LLAMA).save_pretrained(f"{folder}/by one rank")


def save_and_load_after_evaluating(folder: str) -> bool:
    model = full(LLAMA, {"shard": 4}, torch.bfloat16)
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


def test_files_of_a_sharded_model_equal_the_unsharded_models(worlds, tmp_path):
    worlds(4).run(save, str(tmp_path))
    for i, (config, axes, options) in enumerate(SAVES):
        plain(config).save_pretrained(tmp_path / f"whole {i}", **options)
        assert contents(tmp_path / f"sharded {i}") == contents(tmp_path / f"whole {i}"), (config, axes)
        assert len(contents(tmp_path / f"whole {i}")) > 5 or options != SMALL_FILES
    assert equals(Llama.from_pretrained(tmp_path / "by one rank"), plain(LLAMA))
    assert all(worlds(4).run(save_and_load_after_evaluating, str(tmp_path / "evaluated")))
    assert contents(tmp_path / "evaluated") == contents(tmp_path / "whole 0")


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
        assert 0 < peak <= max(LIMIT, largest) + largest


FAILURES = [(1, "model-00002"), (2, "model-00007"), (0, "config.json")]


def errors_of_a_full_disk(folder: str) -> list[str]:
    """The error on this rank when one rank cannot write one file."""
    write_partial, errors = write.write_partial, []
    model = full(LLAMA, {"shard": 4})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for rank, name in FAILURES:

        def full_disk(path, pieces, rank=rank, name=name):
            write_partial(path, pieces)
            if dist.get_rank() == rank and path.name.startswith(name):
                raise OSError("disk full")

        with patch.object(write, "write_partial", full_disk), pytest.raises(OSError) as error:
            model.save_pretrained(folder, max_file_bytes=500)
        dist.barrier()
        errors.append(str(error.value))
    return errors


def test_an_error_on_one_rank_is_raised_on_all_and_the_old_files_stay(worlds, tmp_path):
    plain(LLAMA).save_pretrained(tmp_path, max_file_bytes=LIMIT)
    before = contents(tmp_path)
    answers = worlds(4).run(errors_of_a_full_disk, str(tmp_path))
    for (failing, _), messages in zip(FAILURES, zip(*answers, strict=True), strict=True):
        for rank, message in enumerate(messages):
            on_others = f"nothing was saved: rank {failing} had OSError: disk full"
            assert message == ("disk full" if rank == failing else on_others)
    assert contents(tmp_path) == before


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


# -- on one device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_wrapped_model_is_filled_in_place(tmp_path, config):
    plain(config).save_pretrained(tmp_path)
    model = model_of(config)
    blocks = model.model.layers if config is LLAMA else model.transformer.h
    blocks[0] = checkpoint_wrapper(blocks[0])
    before = [parameter.data_ptr() for parameter in model.parameters()]
    load_pretrained(model, tmp_path)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert equals(model, plain(config)) and model.source == tmp_path


def test_a_model_for_longer_sequences_takes_the_weights_of_a_shorter_one(tmp_path):
    plain(LLAMA).save_pretrained(tmp_path)
    longer = replace(LLAMA, rope_theta=1e7, rope_scaling=LinearScaling(factor=2), max_positions=10**6, window=50)
    model = Llama(longer)
    load_pretrained(model, tmp_path)
    assert torch.equal(model.head_weight, plain(LLAMA).head_weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_cuda_model_is_loaded_and_saved(tmp_path, config):
    plain(config).save_pretrained(tmp_path / "a")
    model = model_of(config).cuda()
    load_pretrained(model, tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
