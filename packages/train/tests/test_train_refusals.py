"""Tables of wrong command lines, files, calls and runs: each is refused in one line that names it, on every rank."""

import errno
import io
import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save
from test_train_checkpoints import SMALL, trained
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard
from training_runs import at

from armillary.attention import Local
from armillary.core.testing import refusal
from armillary.data.prepare import Preparation
from armillary.data.prepare import prepare as prepare_store
from armillary.data.text.tokenizer import train_bpe
from armillary.models import GPT, GPTConfig, Llama, LlamaConfig
from armillary.models.internal import meta_model, parameter_shapes, parse
from armillary.models.parameter_shards import box_of
from armillary.train import Config, DataConfig, LogConfig, ModelConfig, ParallelConfig, SaveConfig, TrainConfig
from armillary.train import cli as trainer
from armillary.train.build import vocabulary_size
from armillary.train.checkpoint.export import main as export
from armillary.train.checkpoint.output_folder import CheckpointFolder
from armillary.train.checkpoint.tensors_and_manifest import FORMAT, MANIFEST, Manifest, checkpoint_fault, checksum
from armillary.train.config import check_config
from armillary.train.config.check import check_log
from armillary.train.generate import Generate
from armillary.train.generate import main as generate
from armillary.train.generate import run as continue_prompts
from armillary.train.internal import open_stores
from armillary.train.random_state import WORDS, random_state, set_random_state
from armillary.train.run_tokenizer import TokenSource

RUN = replace(SMALL, parallel=ParallelConfig(ring=2, ulysses=1), save=SaveConfig(every=1))
"""The run of two steps on two ranks in the folder `run`."""
HUB = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 12,
    "tie_word_embeddings": True,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SHAPES = parameter_shapes(meta_model, parse(HUB))
WEIGHTS = save({name: torch.zeros(shape) for name, shape in SHAPES.items()})
FILES = {
    "text.txt": "some words\n" * 40,
    "other.txt": "other words\n" * 40,
    "posts.jsonl": '{"text": "a"}',
    "config.yaml": "train:\n  steps: 3\n",
    "line\nbreak.toml": "[train]\nstepss = 3",
    "bad_syntax.py": "def f(:\n",
    "bad_import.py": "1 / 0\n",
    "bad_recipes.py": "def number():\n return 3\ndef needs(x):\n return x\ndef fails():\n raise KeyError('x')\n",
    "manifest-empty/manifest.json": "{}",
    "hub-kind/config.json": '{"model_type": "rwkv"}',
    "hub-none/notes.txt": "",
    "hub-theta/config.json": json.dumps(HUB | {"rope_theta": math.nan}),
    "hub-large/config.json": json.dumps(HUB | {"hidden_size": 10**9}),
    "hub-plain/config.json": json.dumps(HUB),
    "hub-wide/config.json": json.dumps(HUB | {"hidden_size": 10**6}),
    "hub-wide/model.safetensors": WEIGHTS,
    "hub-layers/config.json": json.dumps(HUB | {"num_hidden_layers": 10**6}),
    "hub-layers/model.safetensors": WEIGHTS,
    "hub-sentencepiece/tokenizer.model": "",
    "bpe/tokenizer.json": train_bpe(iter(["a cat sat on a mat"] * 3), 270).definition,
    "run-begun/config.json": '{"train": {}}',
    "run-empty/checkpoint/none": "",
    "run-data/config.json": '{"train": {}, "data": [1]}',
    "run-path/config.json": '{"train": {}, "data": {"path": 5}}',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with all files, a store, and two models."""
    root = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("folder.toml", "folder"):
        (root / name).mkdir()
    for name in ("loop.toml", "loop"):
        (root / name).symlink_to(root / f"{name}.other")
        (root / f"{name}.other").symlink_to(root / name)
    prepare_store(Preparation([root / "text.txt"], root / "store"), workers=1)
    llama = LlamaConfig(vocab_size=60, dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48)
    Llama(llama, Local()).save_pretrained(root / "hub")
    GPT(GPTConfig(vocab_size=60, dim=24, layers=1, heads=4, max_positions=12), Local()).save_pretrained(root / "gpt")
    return root


def change_manifest(place: Path, **fields: Any) -> None:
    """Changes fields of a manifest, and its checksum."""
    old = json.loads((place / MANIFEST).read_text())
    new = {name: value for name, value in (old | fields).items() if name != "crc32"}
    (place / MANIFEST).write_text(json.dumps(new | {"crc32": checksum(new)}))


@pytest.fixture(scope="module")
def run_folder(worlds, folder) -> Path:
    """The same folder, with the finished run `run` and changed copies of it."""
    worlds(2).run(trained, at(RUN, folder / "run", steps=2), 0)
    model = Manifest.read(folder / "run/checkpoint/step-2").model
    for name, fields in {
        "layers": {"model": model | {"num_hidden_layers": 10**6}},
        "sizes": {"model": model | {"hidden_size": 64}},
        "kinds": {"model": model | {"vocab_size": "many"}},
        "older": {"format": FORMAT - 1},
        "newer": {"format": FORMAT + 1},
        "data": {},
        "path": {},
        "damaged": {},
        "unsaved": {},
    }.items():
        shutil.copytree(folder / "run/checkpoint", folder / f"run-{name}/checkpoint")
        change_manifest(folder / f"run-{name}/checkpoint/step-2", **fields)
    damaged = folder / "run-damaged/checkpoint"
    os.truncate(damaged / "step-1/rank-1.safetensors", 7)
    with (damaged / "step-2/rank-0.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    for step in (1, 2):
        (folder / f"run-unsaved/checkpoint/step-{step}/{MANIFEST}").write_text("{}")
    return folder


def unexpected(*_: object) -> None:
    raise AssertionError("it was started")


# -- commands ----------------------------------------------------------------------------------------------------------

OUT_OF_RANGE = """
train.steps 0, train.seed -1, train.accumulation 0, train.bad-steps 0, train.timeout-minutes 0
train.timeout-minutes inf, optimizer.lr 0, optimizer.lr nan, optimizer.lr inf, optimizer.min-lr 1, optimizer.min-lr -1
optimizer.weight-decay -1, optimizer.beta1 1, optimizer.beta2 1, optimizer.eps 0, optimizer.clip-norm 0
optimizer.warmup-steps -1, data.sequence-length 0, data.global-batch-size 0, data.validation-fraction 0
data.validation-fraction 1, parallel.ring 0, parallel.shard -1, parallel.heads-per-stage 0, parallel.team 0
model.dim 0, model.layers 0, model.vocab-size 0, model.rope-theta -1, model.rope-factor nan
save.every 0, save.keep-last 0, save.keep-every 0, log.every 0, validation.batches 0
"""
"""Flags with a value outside of their range."""

TRAIN = [
    *((f"--{pair}", rf"--{pair}(\.0)?: ") for pair in re.findall(r"[\w.-]+ [^\s,]+", OUT_OF_RANGE)),
    ("--nothing", "--nothing"),
    ("--trian.steps 3", "--trian.steps.*--train.steps"),
    ("--train.stepss 3", r"Perhaps you meant: --train\.steps(, --[\w.-]+)*\. For full"),  # without their help texts
    ("--train.steps", "'--train.steps'"),
    ("--train.steps many", "--train.steps: 'many'.*64Ki"),
    ("--train.steps 1.5", "--train.steps: '1.5'"),
    ("--train.accumulation 3", "--data.global-batch-size 4 "),
    ("--train.device tpu", "'--train.device'"),
    ("--optimizer.lr 1e-5", "--optimizer.min-lr 0.0001: .*--optimizer.lr 1e-05"),
    ("--optimizer.schedule polynomial", "'polynomial'"),
    ("--optimizer.decay-steps 5", "--optimizer.decay-steps 5: .*--optimizer.schedule wsd.*cosine"),
    ("--optimizer.schedule wsd --optimizer.decay-steps 0", "--optimizer.decay-steps 0: "),
    ("--optimizer.schedule wsd --optimizer.decay-steps 71", r"--optimizer.decay-steps 71: .*1\.\.70.*80"),
    ("--data.global-batch-size 3 --parallel.shard 2", "--data.global-batch-size 3 .*replicate 1 x shard 2.*of 2"),
    ("--parallel.shard 2 --train.accumulation 4", "--data.global-batch-size 4 .*replicate 1 x shard 2.*of 8"),
    ("--data.weights 1", "--data.weights "),
    ("--data.path a b --data.weights 1 0", "--data.weights 1.0 0.0: "),
    ("--data.task recall", "--data.task: "),
    ("--data.layout spiral", "'spiral'.*'--data.layout'.*'zigzag'"),
    ("--recipe hybrid --data.layout striped", "--data.layout striped"),
    ("--recipe hybrid --parallel.contiguous-states --parallel.tp 2", "--parallel.contiguous-states .*--parallel.tp 2"),
    ("--parallel.cp 8 --parallel.ring 2", "--parallel.cp 8 .*--parallel.ring.*--parallel.ulysses"),
    ("--parallel.attention ring --parallel.team 2", "--parallel.attention: .*team=2"),
    ("--parallel.attention wallfacer --parallel.heads-per-stage 4", "--parallel.attention: .*heads_per_stage=4"),
    ("--parallel.attention upipe+nothing", r"'upipe\+nothing'"),
    ("--parallel.compiler eager --cuda.sm-margin 4", "--cuda.sm-margin 4"),
    ("--model.dim 100", "--model.dim 100 .*--model.heads 8.*--model.head-dim"),
    ("--model.head-dim 7", "head_dim=7"),
    ("--model.latent-key-dim 8", "--model.latent-key-dim.*--model.latent-rank"),
    ("--model.latent-rank 8 --model.latent-rotary-dim 3", "rotary_dim=3"),
    ("--model.latent-rank 8 --model.qk-norm", "qk_norm=True .*latent"),
    ("--model.latent-rank 8 --model.mixers mamba2", "states=.*latent"),
    ("--model.latent-rank 0", "--model.latent-rank 0: "),
    ("--model.kv-heads 3", "heads=8 .*kv_heads=3"),
    ("--model.family gpt --model.kv-heads 4", "--model.kv-heads: a GPT"),
    ("--model.family gpt --model.rope-scaling none", "--model.rope-scaling: a GPT"),
    ("--model.family gpt --model.no-tied-embeddings", "--model.no-tied-embeddings: a GPT"),
    ("--model.pretrained none", "--model.pretrained none: .*--model.pretrained FOLDER"),
    ("--recipe finetune", "--model.pretrained pretrained: .*--model.pretrained FOLDER"),
    ("--model.pretrained hub-none", "hub-none/config.json: "),
    ("--model.pretrained hub-kind", "hub-kind/config.json: model_type='rwkv'"),
    ("--model.pretrained hub-theta", "hub-theta/config.json: rope_theta=nan"),
    ("--model.pretrained hub-wide", "model.embed_tokens.weight"),
    ("--model.pretrained hub-layers", "hub-layers"),
    ("--model.pretrained hub --model.dim 128", "--model.dim: the model in hub "),  # the default
    ("--model.dim=32 --model.pretrained hub", "--model.dim: the model in hub "),  # the folder's own
    ("--model.pretrained hub --model.kv_heads 4", "--model.kv_heads: the model in hub "),
    ("--model.pretrained hub --model.latent-rank 9", "--model.latent-rank: the model in hub "),
    ("--model.pretrained hub --model.no-qk-norm", "--model.no-qk-norm: the model in hub "),
    ("--model.pretrained hub --model.family llama", "--model.family: the model in hub "),
    ("--model.dim 128 --recipe finetune", "--model.dim: the model in "),
    ("--json", "--json"),
    ("--ranks 4", "--ranks"),
    ("--dry-run --ranks 0", "--ranks 0: "),
    ("--dry-run --ranks 4 --parallel.cp 3", "--parallel.cp 3: .* 3 ranks, but --ranks 4 .*--ranks 3"),
    ("--dry-run --ranks 100000000", "--ranks 100000000: "),
    ("--dry-run --data.path none", "none "),
    ("--dry-run --model.pretrained hub-large", "hub-large/config.json: vocab_size=300, hidden_size=1000000000, "),
    ("--dry-run --model.vocab-size 257 --ranks 8 --parallel.ring 3", "6 .*8 "),
    ("--dry-run --model.vocab-size 257 --parallel.ring 20000 --data.sequence-length 200000", "20000.*16,384"),
    ("--dry-run --model.vocab-size 257 --ranks 32 --parallel.ulysses 16 --parallel.ring 2", "8 .*16 "),
    ("--dry-run --model.vocab-size 257 --data.sequence-length 4 --parallel.ring 8", "--data.sequence-length: .*4 .*8 "),
    ("--dry-run --model.vocab-size 257 --parallel.kernel flash", "--parallel.kernel flash: .*cpu_flash, "),
    ("--recipe ''", "--recipe : .*debug"),
    ("--recipe 'a\nb'", "--recipe a b: .*debug"),
    ("--recipe none:f", "--recipe none:f: No module named 'none'"),
    ("--recipe bad_syntax:f", "--recipe bad_syntax:f: SyntaxError"),
    ("--recipe bad_import:f", "bad_import.py:1: "),
    ("--recipe bad_recipes:none", "--recipe bad_recipes:none: bad_recipes .*'none'"),
    ("--recipe bad_recipes:number", "--recipe bad_recipes:number: .*int, not a Config"),
    ("--recipe bad_recipes:needs", r"--recipe bad_recipes:needs: TypeError: needs\(\)"),
    ("--recipe bad_recipes:fails", "bad_recipes.py:6: 'x'"),
    ("--recipe ./bad_recipes.py:number", "--recipe ./bad_recipes.py:number: TypeError"),
    ("--config none.toml", "--config none.toml: .*No such file"),
    ("--config folder.toml", "--config folder.toml: "),
    ("--config loop.toml", "--config loop.toml: "),
    ("--config config.yaml", "--config config.yaml: .*.toml or .json"),
    ("--config 'line\nbreak.toml'", "--config line break.toml: train.stepss"),
    ("--config a\0b.toml", r"--config a\\x00b.toml"),
]

EXPORT = [
    ("", "CHECKPOINT"),
    ("run", "FOLDER"),
    ("run hub", "hub: .*--overwrite"),
    ("run-empty out", "run-empty/checkpoint: no checkpoint"),
    ("run-damaged out", "step-2: file rank-0.safetensors has other bytes.*step-1: file rank-1.safetensors has 7 "),
    ("run out --dtype int8", "'int8'"),
    ("run out --pretrained none", "--pretrained none: "),
    ("a\0b out", "embedded null"),
    ("none out", "none: manifest.json"),
    ("manifest-empty out", "manifest-empty: "),
    ("run-damaged/checkpoint/step-1 out", "step-1: file rank-1.safetensors has 7 "),
    ("run-damaged/checkpoint/step-2 out", "step-2: file rank-0.safetensors has other bytes"),
    ("run-layers/checkpoint/step-2 out", "run-layers/checkpoint/step-2/manifest.json: model: 1000000 layers"),
    ("run-sizes/checkpoint/step-2 out", "run-sizes/checkpoint/step-2/manifest.json: model: "),
    ("run-kinds/checkpoint/step-2 out", "run-kinds/checkpoint/step-2/manifest.json: model: vocab_size='many'"),
]

GENERATE = [
    ("run", "--prompt"),
    ("none --prompt x", "none: "),
    ("run-begun --prompt x", "run-begun: "),
    ("run-empty --prompt x", "run-empty/checkpoint: "),
    ("run-data --prompt x", r"run-data/config.json: data=\[1\]"),
    ("run-path --prompt x", "run-path/config.json: data.path=5"),
    ("run --prompt x --step 7", "--step 7: run/checkpoint .*1, 2"),
    ("run/checkpoint/step-1 --prompt x --step 2", "--step 2: run/checkpoint/step-1 "),
    ("hub --prompt x --step 1", "--step 1: hub "),
    ("hub --prompt x", "hub: .*--tokenizer.*--ids"),
    ("run --prompt x --tokenizer none.json", "none.json"),
    ("run --prompt x --tokens 64q", "--tokens: '64q'"),
    ("run --prompt x --temperature -1", "temperature=-1.0"),
    ("run --prompt x --parallel.ring 2", "--parallel.ring: .*leave it out"),
    ("run --prompt x --parallel.tp=2", "--parallel.tp: it is --tp"),
]

TABLES = {"train": (trainer.main, TRAIN), "export": (export, EXPORT), "generate": (generate, GENERATE)}
COMMANDS = [(main, name, *row) for name, (main, table) in TABLES.items() for row in table]


@pytest.mark.parametrize(
    ("main", "name", "line", "message"), COMMANDS, ids=[f"{row[1]} {row[2]}"[:60] for row in COMMANDS]
)
def test_commands_are_refused(run_folder, monkeypatch, main, name, line, message):
    monkeypatch.chdir(run_folder)
    monkeypatch.setattr("armillary.train.loop.train", lambda config, *_: (check_config(config), unexpected()))
    actual = refusal(main, shlex.split(line))
    assert actual.startswith(f"armillary-{name}: ") and re.search(message, actual)
    assert not Path("out").exists()


CONFIG_FILES = [
    ("run.json", "", ""),
    ("run.json", "[1]", "object, not list"),
    ("run.json", '{"optimizer": {"lr": NaN}}', "optimizer.lr = nan"),
    ("run.toml", bytes(range(256)), "'utf-8'"),
    ("run.toml", "[train\nsteps = ", "Expected ']'"),
    ("run.toml", "train = 3", "train "),
    ("run.toml", "sequence-length = 3", "sequence-length.*data.sequence_length"),
    ("run.toml", "[trian]\nsteps = 3", "trian.*train."),
    ("run.toml", "[train]\nstepss = 3", "train.stepss .*train.steps"),
    ("run.toml", "[data]\nrows = 3", "data.rows.*data.global_batch_size"),
    ("run.toml", "[train]\nsteps = 'x'", "train.steps = 'x'"),
    ("run.toml", "[train]\nsteps = true", "train.steps = True"),
    ("run.toml", "[train]\nsteps = 2020-01-01", r"train.steps = datetime.date\(2020, 1, 1\)"),
    ("run.toml", "[model]\ndim = '3q'", "model.dim = '3q'.*131072"),
    ("run.toml", "[data]\nsequence-length = '64KiB'", r"data.sequence_length = '64KiB'.*64Ki \(65,536\)"),
    ("run.toml", "[data]\nlayout = 'spiral'", "data.layout = 'spiral'.*'zigzag', 'contiguous', 'striped'"),
    ("run.toml", "[model]\nkv-heads = 1\nkv_heads = 2", "model.kv_heads"),
    ("run.toml", "[model]\nkv_heads = 1\nkv-heads = 2", "model.kv-heads"),
    ("run.toml", "[checkpointing]\noffload = true", "checkpointing.*offload=True"),
    ("run.toml", "recipe = 3", "recipe = 3"),
]


@pytest.mark.parametrize(("name", "text", "message"), CONFIG_FILES, ids=range(len(CONFIG_FILES)))
def test_configuration_files_are_refused(tmp_path, monkeypatch, name, text, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("armillary.train.loop.train", lambda config, *_: (check_config(config), unexpected()))
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert re.search(f"--config {name}: .*{message}", refusal(trainer.main, ["--config", name]))


# -- calls -------------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def check(config: Config = Config(), **sections: Any) -> None:  # noqa: B008
    check_config(replace(config, **sections))


def check_pretrained(name: str, **sizes: Any) -> None:
    data = DataConfig(sequence_length=96)
    check(data=data, model=ModelConfig(pretrained=Path(name), **sizes))


def set_position(place: int) -> None:
    state = random_state(CPU)
    state["numpy"][-2] = place
    set_random_state(state, CPU)


TEXT = (Path("text.txt"),)
CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: check(train=TrainConfig(steps="x")), "--train.steps x: "),
    (lambda: check(train=TrainConfig(steps=True)), "--train.steps True: "),
    (lambda: check(data=DataConfig(documents="yes")), "--data.documents yes: "),
    (lambda: check(model=ModelConfig(family="gpt", kv_heads=8)), "--model.kv-heads 8: .*--model.family llama"),
    (lambda: check_pretrained("hub", dim=64), "--model.dim 64: the model in hub has 32"),
    (lambda: check_pretrained("hub", latent_rank=9), "--model.latent-rank 9: the model in hub has None"),
    (lambda: check_pretrained("hub", family="gpt"), "--model.family gpt: the model in hub has llama"),
    (lambda: check_pretrained("gpt", rope_theta=2.0), "--model.rope-theta 2.0: a GPT"),
    (lambda: check_pretrained("gpt"), "--data.sequence-length 96: gpt has 12 "),
    (lambda: check_log(LogConfig(wandb="long"), 10, CPU), r"--log.wandb.*armillary-train\[wandb\]"),
    (lambda: check_log(LogConfig(profile=(3, 11)), 10, CPU), "--log.profile.*11.*1 to 10"),
    (lambda: check_log(LogConfig(trace=Path("t.json"), trace_steps=(0,)), 10, CPU), "--log.trace-steps.*0"),
    (lambda: check_log(LogConfig(trace_steps=(2,)), 10, CPU), "--log.trace-steps.*--log.trace FILE"),
    (lambda: check_log(LogConfig(memory_snapshot=(3,)), 10, CPU), "--log.memory-snapshot.*cuda.*cpu"),
    (lambda: open_stores(DataConfig(path=TEXT), Path("hub-sentencepiece")), "tokenizer.json"),
    (lambda: open_stores(DataConfig(path=(Path("store"),)), Path("bpe")), "store .*bytes"),
    (
        lambda: vocabulary_size(open_stores(DataConfig(path=TEXT), Path("bpe")), ModelConfig(pretrained=Path("hub"))),
        "--model.pretrained hub.*60",
    ),
    (lambda: TokenSource(Path("gone"), TEXT).tokenizer(), "gone does not exist"),  # it may have tokenized the text
    (lambda: TokenSource(None, (Path("gone"),)).tokenizer(), "gone does not exist"),
    (lambda: TokenSource(None, (), "recall").tokenizer(), "recall"),
    (lambda: TokenSource().tokenizer(), "config.json"),
    (
        lambda: checkpoint_fault(CheckpointFolder(Path("run-older/checkpoint")), 2),
        f"step-2 has format {FORMAT - 1}.* format {FORMAT}.*armillary-export.*--model.pretrained",
    ),
    (
        lambda: checkpoint_fault(CheckpointFolder(Path("run-newer/checkpoint")), 2),
        f"step-2 has format {FORMAT + 1}.* format {FORMAT}",
    ),
    (lambda: set_position(-1), f"position -1 of {WORDS}"),
    (lambda: set_random_state({"torch": torch.zeros(3)}, CPU), "state of random numbers"),
    (lambda: box_of((9,), (2, 2), (0, 0), (_StridedShard(0, split_factor=3), Shard(0))), "3 .*dim 0"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=range(len(CALLS)))
def test_calls_are_refused(run_folder, monkeypatch, call, message):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    monkeypatch.chdir(run_folder)
    with pytest.raises(ValueError) as error:
        call()
    assert re.search(message, str(error.value)) and "\n" not in str(error.value)


# -- ranks -------------------------------------------------------------------------------------------------------------


def train(*lines: str) -> str:
    """Trains on this rank with the flags of a line, of which there is one, or one for each rank."""
    return refusal(trainer.main, ["--train.device", "cpu", *shlex.split(lines[dist.get_rank() % len(lines)])])


def resume(*changes: dict[str, Any], name: str = "run", **train: Any) -> str:
    """Resumes the finished run with other sections of its configuration, which are the same or differ by rank."""
    config = replace(RUN, **changes[dist.get_rank() % len(changes)]) if changes else RUN
    with pytest.raises(ValueError) as error:
        trained(at(config, Path.cwd() / name, **{"steps": 2} | train), 0)
    return str(error.value)


def resume_unless(call: str, name: str, error: int, ranks: tuple[int, ...], output: str = "run") -> str:
    """Resumes the run while a system call fails on some ranks for files of this name."""
    owner = io if call == "io.open" else os
    call = call.removeprefix("io.")
    real = getattr(owner, call)

    def fails(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith(name):
            raise OSError(error, os.strerror(error), str(path))
        return real(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() in ranks:
            patch.setattr(owner, call, fails)
        return resume(name=output)


def continue_prompt(source: str, **changes: Any) -> str:
    request = Generate(Path(source), prompt=("1", "2 3"), tokens=6, ids=True, device="cpu", precision="float64")
    with pytest.raises(ValueError) as error, redirect_stdout(io.StringIO()):
        continue_prompts(replace(request, **changes))
    assert "--train." not in str(error.value)  # these are flags of another command
    return str(error.value)


RANKS: list[tuple[Callable[[], str], str]] = [
    # armillary-train, after the rendezvous
    (lambda: train("--data.path none"), "none "),
    (lambda: train("--data.path empty"), "empty "),
    (lambda: train("--data.path posts.jsonl"), "posts.jsonl .*token store"),
    (lambda: train("--data.path text.txt --data.sequence-length 1G"), "1,000,000,000"),
    (lambda: train("--data.sequence-length 1 --parallel.ring 2"), "--data.sequence-length: .*1 tokens .*2 shards"),
    (lambda: train("--data.path text.txt --model.vocab-size 9"), "--model.vocab-size 9: .*256"),
    (lambda: train("--data.path text.txt --model.pretrained hub-plain"), "hub-plain "),
    (lambda: train("--parallel.ring 3"), "ring 3 x ulysses 1 x tp 1 = 3 ranks, but 2 "),
    (lambda: train("--parallel.ulysses 2 --model.heads 1 --model.kv-heads 1"), "1 query heads .*2 ranks .*'ulysses'"),
    (lambda: train("--parallel.attention telepathy"), "--parallel.attention: .*'telepathy'.*local, ring, token_ring,"),
    (lambda: train("--parallel.attention ring --parallel.ulysses 2"), "ring .*'ulysses' with 2 ranks"),
    (lambda: train("--parallel.kernel cudnn"), "--parallel.kernel cudnn: .*cpu_flash, dense"),
    (lambda: train("--train.output text.txt/inside"), "--train.output text.txt/inside: cannot be written to"),
    (lambda: train("--train.output /proc/none"), "--train.output /proc/none: "),
    (lambda: train("--train.device cuda"), "cuda"),
    (lambda: train("--log.profile 99"), "--log.profile: "),
    # resuming
    (lambda: resume({"model": ModelConfig(dim=64, layers=1, heads=4, kv_heads=2)}), "hidden_size is 32 .*64 "),
    (lambda: resume({"model": replace(RUN.model, rope_theta=500.0)}), "rope_theta is 10000.0 .*500.0 "),
    (lambda: resume(seed=1), "run/checkpoint/step-2: .*seed 0, not 1"),
    (lambda: resume({"save": SaveConfig(resume="never")}), "--save.resume never: .*run/checkpoint/step-2 exists"),
    (lambda: resume({"save": SaveConfig(every=3)}, {}), "--save.every is 1 on rank 1 and 3 on rank 0"),
    (
        lambda: resume(*({"data": replace(RUN.data, path=(Path(name),))} for name in ("text.txt", "other.txt"))),
        r"stores is \['.* on rank 1 and \['.* on rank 0",
    ),
    (lambda: resume(name=f"new-{dist.get_rank()}"), "folder.*rank 0 .*1"),
    (
        lambda: resume(name="run-damaged"),
        "run-damaged/checkpoint .*step-2: file rank-0.safetensors .*step-1: file rank-1.safetensors has 7 ",
    ),
    (
        lambda: resume_unless("open", "step-2/rank-1.safetensors", errno.EACCES, (1,)),
        "run/checkpoint/step-2/rank-1.safetensors .*Permission denied.* may be intact",
    ),
    (
        lambda: resume_unless("open", "step-2/rank-0.safetensors", errno.EACCES, (0,)),
        "run/checkpoint/step-2/rank-0.safetensors .*Permission denied.* may be intact",
    ),
    (
        lambda: resume_unless("open", "step-2/manifest.json", errno.EACCES, (0, 1)),
        "run/checkpoint/step-2/manifest.json .*Permission denied.* may be intact",
    ),
    (lambda: resume_unless("listdir", "/checkpoint", errno.EACCES, (0, 1)), "Permission denied.*run/checkpoint"),
    (lambda: resume_unless("io.open", ".held", errno.EROFS, (0,)), "run: cannot be written to .*Read-only file system"),
    (lambda: resume_unless("mkdir", "/new/checkpoint", errno.EROFS, (0,), "new"), "new.*Read-only file system"),
    # armillary-generate
    (lambda: continue_prompt("hub", prompt=("1 99",)), r"--prompt .*99, .*0\.\.59"),
    (lambda: continue_prompt("hub", prompt=("one",)), "--prompt 'one': .*--ids"),
    (lambda: continue_prompt("hub", prompt=(), prompt_file=Path("none.txt")), "--prompt-file none.txt: "),
    (lambda: continue_prompt("hub", tp=3), "--tp 3: "),
    (lambda: continue_prompt("hub", device="cuda"), "--device cuda: "),
    (lambda: continue_prompt("gpt", prompt=("1", "1 2 3 4 5 6 7 8")), "8 tokens .*--tokens 6, .* 12 .*--tokens 4"),
    (lambda: continue_prompt("run-layers"), "run-layers/checkpoint/step-2/manifest.json: model: 1000000 layers"),
    (lambda: continue_prompt("run-unsaved"), "run-unsaved/checkpoint "),
]


def refusals(folder: Path) -> list[str]:
    actual = []
    with chdir(folder):
        for call, _ in RANKS:
            actual.append(call())
            dist.barrier()
    return actual


def saved_files(folder: Path) -> dict[Path, int]:
    files = [*folder.glob("run*/checkpoint/*/*"), *folder.glob("run*/config.json")]
    return {path: path.stat().st_mtime_ns for path in files}


def test_every_rank_is_refused_and_checkpoints_do_not_change(worlds, run_folder):
    before = saved_files(run_folder)
    for messages in worlds(2).run(refusals, run_folder):
        for (_, message), actual in zip(RANKS, messages, strict=True):
            assert re.search(message, actual) and "\n" not in actual, (message, actual)
    assert saved_files(run_folder) == before


def train_beyond_memory(folder: Path) -> tuple[object, str]:
    """Returns the exit code and the printed errors of a run whose model no machine can allocate."""
    flags, errors = "--train.device cpu --model.hidden-dim 100T --data.sequence-length 16", io.StringIO()
    paths = ["--data.path", str(folder / "text.txt"), "--train.output", str(folder / "new")]
    with redirect_stderr(errors), pytest.raises(SystemExit) as stop:
        trainer.main([*flags.split(), *paths])
    return stop.value.code, errors.getvalue()


def test_a_model_that_no_machine_can_allocate_ends_in_one_line(worlds, folder):
    for code, printed in worlds(2).run(train_beyond_memory, folder):
        assert code == 1 and printed.count("\n") == 1 and "153,600,000,000,263,552 parameters" in printed, printed
