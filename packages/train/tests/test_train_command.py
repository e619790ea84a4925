"""Recipes, files and flags: precedence and printed configuration."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from armillary.core.testing import commands_in
from armillary.models import Checkpointing
from armillary.train import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    recipes,
)
from armillary.train.cli import RECIPES, Command, main, read_command
from armillary.train.config import check_config, flat, overlay_settings
from armillary.train.config.overlay import read_settings


def command(*argv: object) -> Config:
    return read_command([str(word) for word in argv])[0].run


def write_config(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_flags_override_the_file_and_the_file_the_recipe(tmp_path):
    text = 'recipe = "llama3_8b_1m"\n[data]\npath = ["a", "b"]\nsequence-length = 2_097_152\n'
    text += "[train]\nsteps = 5\nseed = 3"
    path = write_config(tmp_path, text)
    recipe = recipes.llama3_8b_1m()
    data = replace(recipe.data, sequence_length=2_097_152, path=(Path("a"), Path("b")))
    expected = replace(recipe, data=data, train=replace(recipe.train, steps=7, seed=3))
    assert command("--config", path, "--train.steps", 7) == expected
    assert command("--train.steps", 7, "--config", path, "--data.sequence_length", 2_097_152) == expected
    path = write_config(tmp_path, 'recipe = "llama3_8b_1m"\n[train]\nseed = 3\n')
    assert command("--recipe", "debug", "--config", path) == Config(train=TrainConfig(seed=3))
    assert command() == recipes.debug() == Config()


def test_keys_accept_dashes_and_underscores_and_values_of_every_kind(tmp_path):
    path = write_config(
        tmp_path,
        """
        data = { documents = true, weights = [1, 0.5] }
        parallel = { heads-per-stage = 8, ring = "none" }
        checkpointing = { policy = "layer", offload = true }
        log = { profile = [3, 4] }
        model = { rope-scaling = "none" }
        """,
    )
    recipe = Config(parallel=ParallelConfig(ring=2))
    assert overlay_settings(recipe, read_settings(path), path) == Config(
        data=DataConfig(documents=True, weights=(1.0, 0.5)),
        parallel=ParallelConfig(heads_per_stage=8),
        checkpointing=Checkpointing("layer", offload=True),
        log=LogConfig(profile=(3, 4)),
        model=ModelConfig(rope_scaling="none"),
    )


def test_lists_and_whole_numbers_are_accepted_and_in_files_numbers_as_text(tmp_path):
    data = DataConfig(path=[Path("a")], weights=[1])
    check_config(Config(data=data, optimizer=OptimizerConfig(clip_norm=float("inf")), log=LogConfig(profile=[1])))

    settings = {"data": {"sequence_length": "64k"}, "train": {"steps": "1Ki"}, "log": {"profile": ["1k", 3]}}
    toml = 'data = { sequence-length = "64k" }\ntrain = { steps = "1Ki" }\nlog = { profile = ["1k", 3] }'
    for path in (write_config(tmp_path, json.dumps(settings), "run.json"), write_config(tmp_path, toml)):
        config = command("--config", path)
        assert (config.data.sequence_length, config.train.steps, config.log.profile) == (64_000, 1024, (1000, 3))


def test_files_of_a_run_have_every_field_and_are_read_back_equally(tmp_path, capsys):
    changes = ("--parallel.cp", 4, "--log.trace", "a b", "--checkpointing.policy", "layer", "--parallel.ring", "None")
    for name in RECIPES:
        main([*map(str, ("--recipe", name, *changes)), "--export-config"])
        text = capsys.readouterr().out
        config = command("--recipe", name, *changes)
        assert command("--config", write_config(tmp_path, text)) == config
        fields = [key for key, _ in flat(config)]
        assert re.findall(r"^(?:# )?([\w-]+) =", text.partition("[")[2], re.MULTILINE) == [
            key.rpartition(".")[2].replace("_", "-") for key in fields
        ]
        assert text.count("\n#") >= len(fields)
    record = write_config(tmp_path, json.dumps(asdict(config), default=str), "config.json")
    assert command("--recipe", "llama3_70b_128k", "--config", record) == config  # the file has all keys


def test_differences_from_the_recipe_are_printed_in_aligned_lines():
    flags = "--model.dim 256 --data.path a b --parallel.ring 4 --train.steps 80"
    _, overrides = read_command(flags.split())
    assert overrides == [
        "recipe: debug",
        "  data.path      none -> a b",
        "  parallel.ring  none -> 4",
        "  model.dim      128 -> 256",
    ]
    assert read_command(["--recipe", "llama3_8b_5m"])[1] == ["recipe: llama3_8b_5m"]


def test_help_shows_the_recipes_values(capsys):
    with pytest.raises(SystemExit) as stop:
        read_command(["--recipe", "llama3_8b_5m", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert "(default: 5242880)" in shown and "--recipe" in shown and "--dry-run" in shown


def test_help_begins_with_examples_that_parse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, 'recipe = "llama3_8b_128k"', "planned.toml")
    examples = commands_in(Command.__doc__, "armillary-train", "armillary.train")
    runs = [read_command(words)[0] for words in examples]
    assert [run.run.parallel.cp for run in runs] == [None, None, 8, None, None, None]
    assert runs[3].config == Path("planned.toml") and runs[4].dry_run and runs[5].export_config
    assert all(len(line) <= 4 + 84 for line in Command.__doc__.splitlines() if line.startswith("      "))


def test_a_user_defined_recipe(tmp_path, monkeypatch):
    (tmp_path / "mine_for_test.py").write_text(
        "from armillary.train import Config, TrainConfig\ndef run():\n    return Config(train=TrainConfig(steps=7))\n"
    )
    monkeypatch.chdir(tmp_path)
    run, overrides = read_command(["--recipe", "mine_for_test:run", "--train.seed", "1"])
    assert run.run == Config(train=TrainConfig(steps=7, seed=1))
    assert overrides == ["recipe: mine_for_test:run", "  train.seed  0 -> 1"]
