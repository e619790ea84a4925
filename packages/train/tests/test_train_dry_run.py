"""Dry runs of the trainer: every recipe sharded over fake ranks; mesh and shapes."""

import json
from dataclasses import replace
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch

from armillary.core.testing import fake_world
from armillary.models import Llama, LlamaConfig
from armillary.train import Config, DataConfig, ModelConfig, ParallelConfig, recipes
from armillary.train.cli import main, read_command
from armillary.train.config import model_config
from armillary.train.internal import choose_axes, dry_run, shard_model

RANKS = {
    "debug": 4,
    "hybrid": 4,
    "llama3_8b_128k": 8,
    "llama3_8b_1m": 8,
    "llama3_8b_5m": 8,
    "llama3_70b_128k": 32,
    "gpt_wallfacer_3b": 8,
    "gpt_wallfacer_7b": 8,
}


def test_a_recipe_is_sharded_over_its_ranks():
    for name, ranks in RANKS.items():
        actual = dry_run(getattr(recipes, name)(), ranks)
        assert actual.ranks == ranks
        assert abs(actual.local_parameters * actual.ranks / actual.parameters - 1) < 0.02, name


def test_the_finetuning_recipe_takes_an_8b(tmp_path):
    model = Llama(replace(LlamaConfig.llama31_8b(), layers=1, vocab_size=8, hidden_dim=8))
    model.save_pretrained(tmp_path, dtype=torch.bfloat16)  # writes config.json
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"num_hidden_layers": 32, "vocab_size": 128_256, "intermediate_size": 14_336}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="12 tensors, and 32 layers"):
        dry_run(recipes.finetune(tmp_path), 8)
    (tmp_path / "model.safetensors").unlink()  # config.json is enough
    actual = dry_run(recipes.finetune(tmp_path), 8)
    assert actual.model.parameters() == LlamaConfig.llama3_8b().parameters() and actual.model.max_positions == 131_072
    assert actual.axes == {"replicate": 1, "shard": 1, "ring": 4, "ulysses": 2, "tp": 1}


def dry_run_output(capsys, *flags: str) -> str:
    main(["--dry-run", *flags])
    return capsys.readouterr().out


def test_a_dry_run_prints_mesh_and_shapes_and_the_commands_for_memory_and_time(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("armillary.train.dry_run.find_spec", lambda name: ModuleSpec(name, None))  # installed
    output = dry_run_output(capsys, "--recipe", "llama3_8b_128k", "--model.layers", "2")
    rows = [" ".join(line.split()) for line in output.splitlines()]
    assert rows[0] == "LLaMA, 1,486,901,248 parameters, bfloat16"
    assert rows[1] == "mesh: replicate 1 x shard 1 x ring 1 x ulysses 8 x tp 1 = 8 ranks"
    for row in (
        "tokens 1 x 16,384",
        "queries 1 x 16,384 x 32 x 128",
        "queries in attention 1 x 131,072 x 4 x 128",
        "keys in attention 1 x 131,072 x 1 x 128",
        "model.layers.*.mlp.down_proj.weight 2 4,096 x 14,336 512 x 14,336",
        "all 1,486,901,248 185,862,656",
    ):
        assert row in rows
    assert rows[-2].startswith("a step: 1,048,576 tokens, ") and rows[-2].endswith(" FLOPs")
    assert rows[-1].startswith("memory and time of a step: armillary-plan run") and "install" not in rows[-1]
    assert list(tmp_path.iterdir()) == []  # nothing is written


def test_without_the_planner_its_installation_from_a_checkout_is_named(capsys, monkeypatch):
    monkeypatch.setattr("armillary.train.dry_run.find_spec", lambda _: None)
    main(["--dry-run", "--model.vocab-size", "257"])
    assert "pip install ./packages/plan" in capsys.readouterr().out.splitlines()[-1]


def kernels(*flags: str, **options) -> list[tuple[str, str | None, dict[str, str]]]:
    actual = dry_run(read_command([*flags, "--model.vocab-size", "257"])[0].run, **options).kernels
    return [(each.device, each.name, each.rejected) for each in actual]


def test_a_dry_run_names_the_attention_kernel_and_why_better_ones_are_not_used(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ampere, hopper, blackwell = kernels()
    assert ampere[:2] == ("compute capability 8.0 (Ampere, Ada)", "cuda_flash")
    assert hopper[1:] == ("cudnn", {"flash_attn_3": "flash_attn_interface is not installed"})
    assert blackwell[1:] == ("cudnn", {"flash_attn_4": "flash_attn.cute.interface is not installed"})
    assert kernels("--train.device", "cpu") == [("cpu", "cpu_flash", {})]
    ((_, name, refused_kernels),) = kernels("--data.documents", capability=(9, 0))
    assert name == "cuda_flash" and set(refused_kernels) == {"flash_attn_3", "flash_attn_2"}
    assert [name for _, name, _ in kernels("--train.precision", "float32")] == ["efficient"] * 3
    named = kernels("--parallel.kernel", "cudnn")
    assert [name for _, name, _ in named] == [None, "cudnn", "cudnn"] and "not 8.0" in named[0][2]["cudnn"]
    output = dry_run_output(capsys, "--model.vocab-size", "257").splitlines()
    assert (
        "attention kernel on compute capability 9.0 (Hopper): cudnn (not flash_attn_3: flash_attn_interface is not "
        "installed)"
    ) in output


def test_a_run_uses_the_named_kernel():
    config = Config(model=ModelConfig(vocab_size=257), parallel=ParallelConfig(ring=2, ulysses=2, kernel="dense"))
    with fake_world(**choose_axes(config, 4)) as mesh:
        sizes = model_config(config.model, 257, config.data.sequence_length)
        assert shard_model(sizes, config, mesh, torch.float32)[1].kernel == "dense"


def test_a_dry_run_can_print_json(capsys):
    flags = ["--model.vocab-size", "257", "--parallel.shard", "4", "--ranks", "16", "--json"]
    actual = json.loads(dry_run_output(capsys, *flags))
    assert actual["axes"] == {"replicate": 1, "shard": 4, "ring": 2, "ulysses": 2, "tp": 1}
    assert actual["shapes"]["tokens"] == [1, 256]
    assert actual["parameters"] == LlamaConfig.debug().parameters()


def test_shapes_are_those_of_the_first_rank_in_a_micro_batch():
    config = Config(model=ModelConfig(vocab_size=257))

    def shapes(ranks: int | None = None, length: int = 1024, **axes: Any) -> dict[str, tuple[int, ...]]:
        data = DataConfig(sequence_length=length)
        return dry_run(replace(config, data=data, parallel=ParallelConfig(**axes)), ranks=ranks).shapes

    # The heads of a stage, and of a rank in tensor parallelism, where hidden states are divided by tokens too.
    assert shapes(ulysses=2, ring=1, attention="upipe")["queries in attention"] == (4, 1024, 1, 16)
    shared = shapes(4, tp=2)
    assert shared["queries"] == (4, 512, 4, 16) and "queries in attention" not in shared
    divided = shapes(length=1022, ring=2, ulysses=1, tp=2)
    assert (divided["tokens"], divided["hidden"]) == ((4, 511), (4, 256, 128))
    uneven = shapes(ring=5, ulysses=3)
    assert uneven["tokens"] == (4, 69)  # the next two ranks have 68
    assert uneven["queries in attention"][1] == uneven["keys in attention"][1] == 69 + 68 + 68
    in_parts = replace(
        config, data=replace(config.data, global_batch_size=8), train=replace(config.train, accumulation=2)
    )
    assert dry_run(in_parts).shapes == dry_run(config).shapes


def test_torchruns_ranks_are_used_and_the_first_prints(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "= 4 ranks" in dry_run_output(capsys, "--model.vocab-size", "257")
    monkeypatch.setenv("RANK", "1")
    assert dry_run_output(capsys, "--model.vocab-size", "257") == ""
