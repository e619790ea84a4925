"""Invalid arguments, values and files: commands refuse each with one line that names it."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from armillary.core.testing import refusal
from armillary.models import Checkpointing
from armillary.models.parts import meta_model, parameter_shapes, parse
from armillary.train import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SaveConfig,
    TrainConfig,
)
from armillary.train import cli as trainer
from armillary.train.checkpoint.export import main as export
from armillary.train.command import read_command
from armillary.train.config import check_config


def safetensors(shapes: dict[str, tuple[int, ...]]) -> bytes:
    return save({name: torch.zeros(shape) for name, shape in shapes.items()})


HUB = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 12,
    "tie_word_embeddings": True,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
WEIGHTS = safetensors(parameter_shapes(meta_model, parse(HUB)))
FILES = {
    "empty": "",
    "empty.json": "",
    "text.txt": "some words\n" * 40,
    "binary.toml": bytes(range(256)),
    "binary.json": bytes(range(256)),
    "cut.toml": "[train\nsteps = ",
    "deep.toml": "a = " + "[" * 50_000,
    "deep.json": "[" * 100_000,
    "list.json": "[1]",
    "number.json": "3",
    "nan.json": '{"optimizer": {"lr": NaN}}',
    "digits.json": '{"train": {"steps": ' + "9" * 5000 + "}}",
    "section.toml": "train = 3",
    "unknown.toml": "[train]\nstepss = 3",
    "kind.toml": "[train]\nsteps = 'x'",
    "half.toml": "[train]\nsteps = 1.5",
    "true.toml": "[train]\nsteps = true",
    "huge.toml": "[train]\nsteps = 99999999999999999999999",
    "zero.toml": "[train]\nsteps = 0",
    "date.toml": "[train]\nsteps = 2020-01-01",
    "inf.toml": "[optimizer]\nlr = inf",
    "unit.toml": "[data]\nsequence-length = '64x'",
    "twice.toml": "[data]\nsequence-length = 3\nsequence_length = 4",
    "recipe-number.toml": "recipe = 3",
    "recipe-none.toml": "recipe = 'none'",
    "recipe-module.toml": "recipe = 'no_such_module:f'",
    "config.yaml": "train:\n  steps: 3\n",
    "line\nbreak.toml": "[train]\nstepss = 3",
    "bad_syntax.py": "def f(:\n",
    "bad_import.py": "1 / 0\n",
    "bad_recipes.py": "def number():\n return 3\ndef needs(x):\n return x\ndef fails():\n raise KeyError('x')\n",
    "run/metrics.jsonl": '{"step": 1, "loss": 3.0, "grad_norm": 1.0, "learning_rate": 0.1}\n',
    "manifest-empty/manifest.json": "{}",
    "hub-list/config.json": "[]",
    "hub-deep/config.json": "[" * 100_000,
    "hub-kind/config.json": '{"model_type": "rwkv"}',
    "hub-lacks/config.json": '{"model_type": "llama"}',
    "hub-none/notes.txt": "",
    "hub-theta/config.json": json.dumps(HUB | {"rope_theta": math.nan}),
    "hub-epsilon/config.json": json.dumps(HUB | {"rms_norm_eps": math.nan}),
    "hub-text/config.json": json.dumps(HUB | {"rms_norm_eps": "small"}),
    "hub-huge/config.json": json.dumps(HUB | {"hidden_size": 2**70}),
    "hub-large/config.json": json.dumps(HUB | {"hidden_size": 10**9}),
    "hub-plain/config.json": json.dumps(HUB),
    "hub-wide/config.json": json.dumps(HUB | {"hidden_size": 10**6}),
    "hub-wide/model.safetensors": WEIGHTS,
    "hub-layers/config.json": json.dumps(HUB | {"num_hidden_layers": 10**6}),
    "hub-layers/model.safetensors": WEIGHTS,
    "hub-index/config.json": json.dumps(HUB),
    "hub-index/model.safetensors.index.json": json.dumps({"weight_map": {"model.norm.weight": ".."}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("folder.toml", "folder"):
        (root / name).mkdir()
    for name in ("loop.toml", "loop"):
        (root / name).symlink_to(root / f"{name}.other")
        (root / f"{name}.other").symlink_to(root / name)
    return root


def unexpected(*_):
    raise AssertionError("it was started")


@pytest.fixture
def in_folder(folder, monkeypatch):
    """Makes the folder of all files the working directory, and fails if a run starts."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("armillary.train.trainer.train", lambda config, *_: (check_config(config), unexpected()))
    return folder


# -- armillary-train ---------------------------------------------------------------------------------------------------

TRAIN = [
    ("--nothing", "--nothing"),
    ("train", "train"),
    ("--train.steps", "'--train.steps'"),
    ("--train.steps many", "--train.steps: 'many'"),
    ("--train.steps 1.5", "--train.steps: '1.5'"),
    ("--train.steps 1e-3", "--train.steps: '1e-3'"),
    ("--train.steps nan", "--train.steps: 'nan'"),
    ("--train.steps 5x", "--train.steps: '5x'"),
    ("--train.steps 0.5k5", "--train.steps: '0.5k5'"),
    ("--train.steps 0", "--train.steps 0: "),
    ("--train.steps -3", "--train.steps -3: "),
    ("--train.steps 99999999999999999999", "'99999999999999999999'"),
    ("--train.steps 9999999999999999999999999999999999999999999999999999999999999999999", "--train.steps"),
    ("--train.seed 99999999999999999999", "'99999999999999999999'"),
    ("--train.seed -1", "--train.seed -1: "),
    ("--train.accumulation 0", "--train.accumulation 0: "),
    (
        "--train.accumulation 3",
        "--data.global-batch-size 4 ",
    ),
    ("--train.bad-steps 0", "--train.bad-steps 0: "),
    ("--train.timeout-minutes 0", "--train.timeout-minutes 0.0: "),
    ("--train.timeout-minutes nan", "--train.timeout-minutes nan: "),
    ("--train.device tpu", "'--train.device'"),
    ("--train.precision float8", "'--train.precision'"),
    ("--optimizer.lr x", "--optimizer.lr: "),
    ("--optimizer.lr 0", "--optimizer.lr 0.0: "),
    ("--optimizer.lr -1", "--optimizer.lr -1.0: "),
    ("--optimizer.min-lr 1", "--optimizer.min-lr 1.0: "),
    ("--optimizer.min-lr -1", "--optimizer.min-lr -1.0: "),
    ("--optimizer.weight-decay nan", "--optimizer.weight-decay nan: "),
    ("--optimizer.beta1 1", "--optimizer.beta1 1.0: "),
    ("--optimizer.beta2 -0.1", "--optimizer.beta2 -0.1: "),
    ("--optimizer.clip-norm nan", "--optimizer.clip-norm nan: "),
    ("--optimizer.warmup-steps -1", "--optimizer.warmup-steps -1: "),
    ("--optimizer.schedule polynomial", "'polynomial'"),
    ("--optimizer.decay-steps 5", "--optimizer.decay-steps 5: "),
    ("--optimizer.schedule wsd --optimizer.decay-steps 0", "--optimizer.decay-steps 0: "),
    ("--optimizer.schedule wsd --optimizer.decay-steps 500", "--optimizer.decay-steps 500: "),
    ("--data.sequence-length 0", "--data.sequence-length 0: "),
    ("--data.global-batch-size 0", "--data.global-batch-size 0: "),
    ("--data.validation-fraction 0", "--data.validation-fraction 0.0: "),
    ("--data.validation-fraction 1", "--data.validation-fraction 1.0: "),
    ("--data.weights 1", "--data.weights "),
    ("--data.path a b --data.weights 1 -1", "--data.weights 1.0 -1.0: "),
    ("--data.task recall", "--data.task: "),
    ("--validation.tasks=recall", "--validation.tasks: "),
    ("--data.rows 3", "--data.rows: it is data.global_batch_size"),
    ("--data.layout spiral", "'spiral'"),
    ("--parallel.ring 0", "--parallel.ring 0: "),
    ("--parallel.shard -1", "--parallel.shard -1: "),
    ("--parallel.attention flash", "'flash'"),
    ("--parallel.attention upipe+nothing", "'upipe+nothing'"),
    ("--parallel.team 0", "--parallel.team 0: "),
    ("--model.dim 100", "--model.dim 100 "),
    ("--model.dim 0", "--model.dim 0: "),
    ("--model.head-dim 7", "head_dim=7"),
    ("--model.rope-theta -1", "--model.rope-theta -1.0: "),
    ("--model.vocab-size 0", "--model.vocab-size 0: "),
    ("--model.family mamba", "'mamba'"),
    ("--model.pretrained none", "none/config.json: "),
    ("--model.pretrained text.txt", "text.txt/config.json: "),
    ("--model.pretrained hub-none", "hub-none/config.json: "),
    ("--model.pretrained hub-list", "hub-list/config.json: "),
    ("--model.pretrained hub-deep", "hub-deep/config.json: "),
    ("--model.pretrained hub-kind", "hub-kind/config.json: model_type='rwkv'"),
    ("--model.pretrained hub-lacks", "hub-lacks/config.json: "),
    ("--model.pretrained hub-theta", "hub-theta/config.json: rope_theta=nan"),
    ("--model.pretrained hub-epsilon", "hub-epsilon/config.json: rms_norm_eps=nan"),
    ("--model.pretrained hub-text", "hub-text/config.json: rms_norm_eps='small'"),
    ("--model.pretrained hub-huge", "hub-huge/config.json: hidden_size=1180591620717411303424"),
    ("--dry-run --model.pretrained hub-large", "hub-large/config.json: vocab_size=300, hidden_size=1000000000, "),
    ("--model.pretrained hub-wide", "model.embed_tokens.weight"),
    ("--dry-run --model.pretrained hub-wide", "model.embed_tokens.weight"),
    ("--model.pretrained hub-layers", "hub-layers"),
    ("--dry-run --model.pretrained hub-layers", "1000000 layers"),
    ("--model.pretrained hub-index", "hub-index/model.safetensors.index.json "),
    ("--save.every 0", "--save.every 0: "),
    ("--save.resume always", "'always'"),
    ("--log.every 0", "--log.every 0: "),
    ("--validation.batches 0", "--validation.batches 0: "),
    ("--checkpointing.policy some", "'some'"),
    ("--json", "--json"),
    ("--ranks 4", "--ranks"),
    ("--dry-run --ranks 0", "--ranks 0: "),
    ("--dry-run --data.path none", "none "),
    ("--dry-run --ranks 100000000", "--ranks 100000000: "),
    ("--recipe none", "--recipe none: "),
    ("--recipe none:f", "--recipe none:f: "),
    ("--recipe bad_syntax:f", "--recipe bad_syntax:f: SyntaxError"),
    ("--recipe bad_import:f", "bad_import.py:1: "),
    ("--recipe bad_recipes:none", "--recipe bad_recipes:none: bad_recipes "),
    ("--recipe bad_recipes:number", "--recipe bad_recipes:number: "),
    ("--recipe bad_recipes:needs", "--recipe bad_recipes:needs: TypeError: needs()"),
    ("--recipe bad_recipes:fails", "bad_recipes.py:6: 'x'"),
    ("--recipe :f", "--recipe :f: ValueError"),
    ("--recipe ./bad_recipes.py:number", "--recipe ./bad_recipes.py:number: TypeError"),
    ("--config none.toml", "--config none.toml: "),
    ("--config folder.toml", "--config folder.toml: "),
    ("--config loop.toml", "--config loop.toml: "),
    ("--config empty", "--config empty: "),
    ("--config config.yaml", "--config config.yaml: "),
    ("--config empty.json", "--config empty.json: "),
    ("--config binary.toml", "--config binary.toml: 'utf-8'"),
    ("--config binary.json", "--config binary.json: 'utf-8'"),
    ("--config cut.toml", "--config cut.toml: Expected ']'"),
    ("--config deep.toml", "--config deep.toml: "),
    ("--config deep.json", "--config deep.json: "),
    ("--config list.json", "--config list.json: "),
    ("--config number.json", "--config number.json: "),
    ("--config nan.json", "--config nan.json: optimizer.lr = nan"),
    ("--config digits.json", "--config digits.json: "),
    ("--config section.toml", "--config section.toml: train "),
    ("--config unknown.toml", "--config unknown.toml: train.stepss "),
    ("--config kind.toml", "--config kind.toml: train.steps = 'x'"),
    ("--config half.toml", "--config half.toml: train.steps = 1.5"),
    ("--config true.toml", "--config true.toml: train.steps = True"),
    ("--config huge.toml", "--config huge.toml: train.steps = 99999999999999999999999"),
    ("--config zero.toml", "--config zero.toml: train.steps = 0"),
    ("--config date.toml", "--config date.toml: train.steps = datetime.date(2020, 1, 1)"),
    ("--config inf.toml", "--config inf.toml: optimizer.lr = inf"),
    ("--config unit.toml", "--config unit.toml: data.sequence_length = '64x'"),
    ("--config twice.toml", "--config twice.toml: data.sequence_length "),
    ("--config recipe-number.toml", "--config recipe-number.toml: recipe = 3"),
    ("--config recipe-none.toml", "--config recipe-none.toml: recipe = none: known are debug, "),
    ("--config recipe-module.toml", "--config recipe-module.toml: recipe = no_such_module:f: "),
]

EXPORT = [
    ("", "PATH"),
    ("run", "PATH"),
    ("none out", "none: manifest.json"),
    ("text.txt out", "text.txt: manifest.json"),
    ("folder out", "folder: manifest.json"),
    ("loop out", "loop"),
    ("manifest-empty out", "manifest-empty: "),
    ("run out more", "more"),
    ("run out --dtype int8", "'int8'"),
    ("run out --pretrained none", "--pretrained none: "),
]

TABLES = {
    "train": (trainer.main, TRAIN),
    "export": (export, EXPORT),
}
ROWS = [(main, name, *row) for name, (main, rows) in TABLES.items() for row in rows]


@pytest.mark.parametrize(("main", "name", "line", "message"), ROWS, ids=[f"{row[1]} {row[2]}"[:60] for row in ROWS])
def test_commands_refuse_invalid_inputs_in_one_line(in_folder, main, name, line, message):
    actual = refusal(main, line.split())
    assert actual.startswith(f"armillary-{name}: ") and message in actual


@pytest.mark.parametrize(
    ("main", "argv", "message"),
    [
        (trainer.main, ["--recipe", ""], "--recipe : .*debug"),
        (trainer.main, ["--recipe", "a\nb"], "--recipe a b: .*debug"),
        (trainer.main, ["--train.steps", ""], "--train.steps.*''"),
        (trainer.main, ["--config", ""], "--config .: "),
        (trainer.main, ["--config", "line\nbreak.toml"], "--config line break.toml: train.stepss"),
        (trainer.main, ["--config", "a\0b.toml"], r"--config a\\x00b.toml"),
        (trainer.main, ["--config", "x" * 5000 + ".toml"], "File name too long"),
        (export, ["a\0b", "out"], "embedded null byte"),
    ],
    ids=range(8),
)
def test_odd_arguments_are_refused_in_one_line(in_folder, main, argv, message):
    assert re.search(message, refusal(main, argv))


# -- errors after the rendezvous ---------------------------------------------------------------------------------------

STARTED = [
    ("--data.path none", "none "),
    ("--data.path empty", "empty "),
    ("--data.path folder", "folder "),
    ("--data.path binary.toml", "binary.toml "),
    ("--data.path loop", "loop "),
    (
        "--data.path text.txt --data.sequence-length 1G",
        "1,000,000,000",
    ),
    ("--data.path text.txt --model.vocab-size 9", "--model.vocab-size 9: "),
    ("--data.path text.txt --parallel.ring 2", "= 2 "),
    ("--train.output text.txt", "--train.output text.txt: "),
    ("--train.output /proc/none", "--train.output /proc/none: "),
    ("--log.profile 99", "--log.profile: "),
    ("--log.trace-steps 3", "--log.trace-steps: "),
    ("--log.memory-snapshot 3", "--log.memory-snapshot: "),
    ("--parallel.kernel cudnn", "--parallel.kernel cudnn: "),
    ("--parallel.kernel cudnn", "cpu_flash, dense"),
    ("--train.device cuda", "cuda"),
    ("--data.path text.txt --model.pretrained hub-plain", "hub-plain "),
]


def refusals(root: Path) -> list[str]:
    os.chdir(root)
    return [refusal(trainer.main, ["--train.device", "cpu", *line.split()]) for line, _ in STARTED]


def test_errors_after_the_rendezvous_are_one_line(worlds, folder):
    for actual, (_, messages) in zip(worlds(1).run(refusals, folder)[0], STARTED, strict=True):
        assert messages in actual


# -- from Python -------------------------------------------------------------------------------------------------------

CONFIGS = {
    "--train.steps x: ": Config(train=TrainConfig(steps="x")),
    "--train.steps 1.5: ": Config(train=TrainConfig(steps=1.5)),
    "--train.steps True: ": Config(train=TrainConfig(steps=True)),
    "--train.steps none: ": Config(train=TrainConfig(steps=None)),
    "--train.steps 9223372036854775808: ": Config(train=TrainConfig(steps=2**63)),
    "--train.device tpu: ": Config(train=TrainConfig(device="tpu")),
    "--optimizer.lr x: ": Config(optimizer=OptimizerConfig(lr="x")),
    "--optimizer.lr nan: ": Config(optimizer=OptimizerConfig(lr=float("nan"))),
    "--data.global-batch-size 2.0: ": Config(data=DataConfig(global_batch_size=2.0)),
    "--data.documents yes: ": Config(data=DataConfig(documents="yes")),
    "--parallel.ring -2: ": Config(parallel=ParallelConfig(ring=-2)),
    "--parallel.attention 3: ": Config(parallel=ParallelConfig(attention=3)),
    "--model.heads 0: ": Config(model=ModelConfig(heads=0)),
    "--save.keep-last 0: ": Config(save=SaveConfig(keep_last=0)),
    "--log.every 0: ": Config(log=LogConfig(every=0)),
}


@pytest.mark.parametrize("message", CONFIGS)
def test_errors_of_a_configuration_name_the_flag(message):
    with pytest.raises(ValueError) as error:
        check_config(CONFIGS[message])
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_lists_and_whole_numbers_are_accepted():
    data = DataConfig(path=[Path("a")], weights=[1])
    check_config(Config(data=data, optimizer=OptimizerConfig(clip_norm=float("inf")), log=LogConfig(profile=[1])))


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="'some'"):
        Checkpointing("some")


def test_files_accept_numbers_as_text(tmp_path):
    text = (
        '[data]\nsequence-length = "64k"\nglobal-batch-size = "80"\n[train]\nsteps = "1Ki"\n[parallel]\nring = "1k"\n'
    )
    (tmp_path / "run.toml").write_text(text)
    (tmp_path / "run.json").write_text(json.dumps({"data": {"sequence_length": "64k"}, "log": {"profile": ["1k", 3]}}))
    config = read_command(["--config", str(tmp_path / "run.toml")])[0].run
    assert (config.data.sequence_length, config.train.steps, config.parallel.ring) == (64_000, 1024, 1000)
    assert config.data.global_batch_size == 80
    config = read_command(["--config", str(tmp_path / "run.json")])[0].run
    assert (config.data.sequence_length, config.log.profile) == (64_000, (1000, 3))
    (tmp_path / "run.toml").write_text('[data]\nsequence-length = "64KiB"\n')
    with pytest.raises(ValueError, match=r"data\.sequence_length = '64KiB'.*64Ki \(65,536\)"):
        read_command(["--config", str(tmp_path / "run.toml")])
