"""`load_pretrained`: every rank reads only its shards of the files, on every mesh."""

from dataclasses import replace
from math import prod
from unittest.mock import patch

import pytest
import torch
from sharded_models import GPT2, LLAMA, MESHES, TIED, empty, full, plain
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from armillary.core import CommLedger
from armillary.models import GPT, GPTConfig, LinearScaling, Llama, LlamaConfig, load_pretrained
from armillary.models.hub.safetensors import TensorEntry

Config = LlamaConfig | GPTConfig


def local(x: torch.Tensor) -> torch.Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def load_and_compare(cases: list[tuple[Config, str]], folder: str) -> list[tuple[int, int, int]]:
    """For each case (tensors that differ from torch's shards, bytes read, bytes of the local shards)."""
    return [load_and_compare_case(config, MESHES[name], f"{folder}/{kind_of(config)}") for config, name in cases]


def kind_of(config: Config) -> str:
    return "gpt2" if config == GPT2 else "tied" if config == TIED else "llama"


def load_and_compare_case(config: Config, axes: dict[str, int], folder: str) -> tuple[int, int, int]:
    model, expected = empty(config, axes), full(config, axes)
    pieces = []

    def read_and_keep(entry, box, read=TensorEntry.read):
        pieces.append(read(entry, box))
        return pieces[-1]

    with patch.object(TensorEntry, "read", read_and_keep), CommLedger() as ledger:
        load_pretrained(model, folder)
    assert ledger.bytes() == 0
    wrong = [
        name
        for (name, result), right in zip(model.named_parameters(), expected.parameters(), strict=True)
        if not torch.equal(local(result), local(right))
    ]
    local_bytes = sum(local(parameter).nbytes for parameter in model.parameters())
    assert all(
        torch.equal(full_tensor(a), b) for a, b in zip(model.parameters(), plain(config).parameters(), strict=True)
    )
    return len(wrong), sum(piece.nbytes for piece in pieces), local_bytes


def full_tensor(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


CASES = {
    4: [*((LLAMA, name) for name in MESHES if prod(MESHES[name].values()) == 4), (GPT2, "tp 4"), (GPT2, "fsdp 2 tp 2")],
    8: [(TIED, "hsdp 2x2 tp 2"), (GPT2, "hsdp 2x2 tp 2"), (LLAMA, "fsdp 4 tp 2")],
}
"""Cases by number of ranks."""


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.long)])
def test_every_rank_reads_only_its_shards(worlds, tmp_path, ranks):
    for config, _ in CASES[ranks]:
        plain(config).save_pretrained(tmp_path / kind_of(config), max_file_bytes=700)
    for actual in worlds(ranks).run(load_and_compare, CASES[ranks], str(tmp_path)):
        for case, (wrong, bytes_read, local_bytes) in zip(CASES[ranks], actual, strict=True):
            assert wrong == 0, case
            assert bytes_read == local_bytes, case


def placements_of_q_proj(axes: dict[str, int]) -> str:
    return str(empty(LLAMA, axes).model.layers[0].self_attn.q_proj.weight.placements)


def test_fsdp_over_tensor_parallelism_shards_one_dim_twice(worlds):
    """Without a strided shard the cases above would not test this order."""
    assert "_StridedShard(dim=0, sf=2), Shard(dim=0)" in worlds(4).run(placements_of_q_proj, {"shard": 2, "tp": 2})[0]


def refusals(folder: str, axes: dict[str, int]) -> list[str]:
    model = empty(LLAMA, axes)
    with pytest.raises(ValueError) as error:
        load_pretrained(model, folder)
    assert not any(local(parameter).any() for parameter in model.parameters())
    return [str(error.value)]


def test_a_mismatched_folder_is_refused_on_every_rank_before_weights_change(worlds, tmp_path):
    plain(LLAMA).save_pretrained(tmp_path, max_file_bytes=700)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    answers = worlds(4).run(refusals, str(tmp_path), {"shard": 4})
    assert all(last.name in message for (message,) in answers)


def bfloat16_weights_are_rounded(folder: str) -> bool:
    model = empty(LLAMA, {"shard": 4}, torch.bfloat16)
    load_pretrained(model, folder)
    expected = plain(LLAMA).parameters()
    return all(torch.equal(full_tensor(a), b.bfloat16()) for a, b in zip(model.parameters(), expected, strict=True))


def test_values_are_rounded_to_the_parameters_dtype(worlds, tmp_path):
    plain(LLAMA).save_pretrained(tmp_path)
    assert all(worlds(4).run(bfloat16_weights_are_rounded, str(tmp_path)))


# -- on one device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_wrapped_model_is_filled_in_place(tmp_path, config):
    plain(config).save_pretrained(tmp_path)
    model = Llama(config) if config is LLAMA else GPT(config)
    blocks = model.model.layers if config is LLAMA else model.transformer.h
    blocks[0] = checkpoint_wrapper(blocks[0])
    before = [parameter.data_ptr() for parameter in model.parameters()]
    load_pretrained(model, tmp_path)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain(config).parameters(), strict=True))
    assert model.source == tmp_path


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
    model = (GPT if isinstance(config, GPTConfig) else Llama)(config).cuda()
    load_pretrained(model, tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
