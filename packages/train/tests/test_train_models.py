"""The model of a run: LLaMA or GPT from sizes, or a Hugging Face folder with weights and tokenizer."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_runs import SMALL as PLAIN
from training_runs import at, on_mesh, train_small

from armillary.data import ByteTokenizer, TextTokenizer
from armillary.data.text.tokenizer import train_bpe
from armillary.models import (
    GPT,
    GPTConfig,
    LinearScaling,
    Llama,
    LlamaConfig,
    YarnScaling,
    initialize,
    linear_token_loss,
)
from armillary.train import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SaveConfig,
    prepare,
    process_group,
)
from armillary.train.build import vocabulary_size
from armillary.train.checkpoint.export import main as export
from armillary.train.cli import read_command
from armillary.train.config import model_config
from armillary.train.internal import open_stores

SMALL = replace(
    PLAIN,
    data=replace(PLAIN.data, sequence_length=96, global_batch_size=2),
    optimizer=OptimizerConfig(warmup_steps=1),
    save=SaveConfig(asynchronous=False),
    train=replace(PLAIN.train, steps=3),
)
SIZES = LlamaConfig(vocab_size=300, dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48, rope_theta=777.0)


def save_model(model: Llama | GPT, folder: Path) -> Path:
    initialize(model, seed=5)
    model.save_pretrained(folder)
    return folder


def test_sizes_select_llama_or_gpt():
    sizes = {"dim": 32, "layers": 2, "heads": 4}
    more = {
        "kv_heads": 2,
        "hidden_dim": 48,
        "head_dim": 10,
        "qk_norm": True,
        "tied_embeddings": True,
        "rope_theta": 5.0,
    }
    llama = model_config(ModelConfig(**sizes, **more), 11, 96)
    assert llama == LlamaConfig(vocab_size=11, **sizes, **more, max_positions=96)
    gpt = model_config(ModelConfig(family="gpt", **sizes), 11, 96)
    assert gpt == GPTConfig(vocab_size=11, **sizes, max_positions=96)
    assert replace(model_config(ModelConfig(), 257, 96), max_positions=8192) == LlamaConfig.debug()


def test_rope_scaling_matches_the_published_models():
    config = ModelConfig(rope_factor=8.0, rope_original_length=8192)
    for name, scaling in {
        "llama3": LlamaConfig.llama31_8b().rope_scaling,
        "yarn": YarnScaling(factor=8.0, original_max_position_embeddings=8192),
        "linear": LinearScaling(factor=8.0),
        None: None,
    }.items():
        assert model_config(replace(config, rope_scaling=name), 11, 96).rope_scaling == scaling


def test_sizes_come_from_the_folder_and_rope_may_be_changed(tmp_path):
    folder = save_model(Llama(SIZES), tmp_path)
    assert model_config(ModelConfig(pretrained=folder), 1, 96) == SIZES
    same = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48, vocab_size=300, pretrained=folder)
    assert model_config(same, 1, 96) == SIZES
    longer = ModelConfig(pretrained=folder, rope_theta=9e5, rope_scaling="linear", rope_factor=2.0)
    assert model_config(longer, 1, 10_000) == replace(
        SIZES, rope_theta=9e5, rope_scaling=LinearScaling(factor=2.0), max_positions=10_000
    )


def test_flags_of_rope_and_of_a_gpt_are_accepted():
    rope = ["--model.pretrained", "folder", "--model.rope-scaling", "none", "--model.rope-theta", "1e4"]
    assert read_command(rope)[0].run.model == ModelConfig(
        pretrained=Path("folder"), rope_scaling="none", rope_theta=1e4
    )
    assert read_command(["--model.family", "gpt", "--model.dim", "128"])[0].run.model.family == "gpt"


def losses(config: Config) -> list[float]:
    return train_small(config)[0].losses


def test_a_gpt_trains_equally_on_one_and_two_ranks(worlds, tmp_path):
    model = ModelConfig(family="gpt", dim=32, layers=2, heads=4)
    config = at(replace(SMALL, model=model), tmp_path / "one")
    alone = worlds(1).run(losses, config)[0]
    assert len(alone) == 3 and alone[-1] < alone[0] - 0.05
    for axis in ("ring", "tp"):
        actual = worlds(2).run(losses, at(on_mesh(config, **{axis: 2}), tmp_path / axis))
        assert actual[0] == actual[1]
        assert max(abs(a - b) for a, b in zip(actual[0], alone, strict=True)) < 1e-5


def test_fine_tuning_starts_from_the_weights_in_the_folder(worlds, tmp_path):
    folder = save_model(Llama(SIZES), tmp_path / "llama")
    tuned = on_mesh(replace(SMALL, model=ModelConfig(pretrained=folder)), ring=2)
    config = at(tuned, tmp_path / "out")
    actual = worlds(2).run(losses, config)[0]
    assert read_command(["--config", str(tmp_path / "out" / "config.json")])[0].run == config
    rows = worlds(1).run(first_rows, replace(config, parallel=ParallelConfig()))[0]
    model = Llama.from_pretrained(folder)
    with torch.no_grad():
        total, count = model(rows[0], head=lambda x, weight: linear_token_loss(x, weight, rows[1]))
    assert actual[0] == pytest.approx((total / count).item(), abs=1e-5)
    assert len(actual) == 3 and actual[-1] < actual[0] - 0.05


def train_and_export(config: Config, folder: Path) -> str:
    """Trains and exports with the command. Returns its messages."""
    losses(config)
    messages = io.StringIO()
    with redirect_stdout(messages):
        export([str(config.train.output / "checkpoint/step-1"), str(folder)])
    return messages.getvalue()


def test_both_exports_copy_tokenizer_and_special_token_ids(worlds, tmp_path):
    folder = save_model(Llama(SIZES), tmp_path / "llama")
    tokenizer_folder(folder)
    config_fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config_fields | {"bos_token_id": 1, "eos_token_id": [2, 3]}))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    tuned = replace(SMALL, model=ModelConfig(pretrained=folder), save=replace(SMALL.save, export=True))
    config = at(tuned, tmp_path / "out", steps=1)
    (messages,) = worlds(1).run(train_and_export, config, tmp_path / "hf")
    assert messages.startswith(f"{tmp_path}/hf: ") and messages.endswith(f"tokenizer of {folder}\n")
    expected = {file.name: file.read_bytes() for file in (tmp_path / "out/export/step-1").iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "hf").iterdir()} == expected
    assert {"tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"} == expected.keys()
    assert json.loads(expected["config.json"])["eos_token_id"] == [2, 3]


def first_rows(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of the first batch, unsharded and in order."""
    with redirect_stdout(io.StringIO()), process_group(config) as device:
        batch = next(prepare(config, device).training)
    return batch.tokens, batch.labels


def tokenizer_folder(folder: Path) -> None:
    tokenizer = train_bpe(iter(["a cat sat on a mat, and a rat sat on a cat"] * 3), 270)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer.definition)
    return tokenizer


def test_text_is_tokenized_by_the_folders_tokenizer(tmp_path):
    (tmp_path / "text.txt").write_text("a cat sat on a mat")
    data, folder = DataConfig(path=(tmp_path / "text.txt",)), tmp_path / "model"
    folder.mkdir()
    assert open_stores(data, folder)[0].vocabulary.tokenizer == ByteTokenizer().identity  # the folder has no tokenizer
    tokenizer_folder(folder)
    store = open_stores(data, folder)[0]
    assert store.vocabulary.tokenizer == TextTokenizer.read(folder).identity and store.tokens < len(
        "a cat sat on a mat"
    )
    assert vocabulary_size([store], ModelConfig(vocab_size=400)) == 400
