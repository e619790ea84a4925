"""The tokenizer of a run in exports and in generation, from any working directory."""

import io
import json
import shutil
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from training_runs import SMALL, at, train_small

from armillary.data import ByteTokenizer, TextTokenizer
from armillary.data.cli import main as data_command
from armillary.models import Llama, LlamaConfig
from armillary.train import DataConfig, ModelConfig, SaveConfig
from armillary.train.checkpoint.export import main as export
from armillary.train.generate import Generate
from armillary.train.generate import run as generate
from armillary.train.run_tokenizer import TokenSource

TEXT = "  def main(x):\n    return 'é' + x  # 日本\n"
SIZES = {"dim": 32, "layers": 1, "heads": 4, "kv_heads": 2, "hidden_dim": 48}
STEP = "checkpoint/step-1"


def train(folder: Path, output: str, model: ModelConfig, data: str) -> str:
    """Trains a step in the working directory `folder`, and returns the printed lines."""
    data_config = DataConfig(path=(Path(data),), sequence_length=16, global_batch_size=1)
    config = replace(SMALL, model=model, data=data_config, save=SaveConfig(export=True))
    with chdir(folder):
        return train_small(at(config, Path(output), steps=1))[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with text, a store of BPE tokens, and weights without a tokenizer."""
    root = tmp_path_factory.mktemp("runs")
    (root / "text").mkdir()
    for number in range(40):
        (root / "text" / f"{number}.txt").write_text(f"{number} {TEXT}" * 8)
    with chdir(root), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        options = "--tokenizer bpe --vocab-size 300 --begin-of-document <|endoftext|> --workers 1"
        data_command(["prepare", "text", "-o", "store", *options.split()])
    Llama(LlamaConfig(vocab_size=300, **SIZES)).save_pretrained(root / "weights")
    return root


@pytest.fixture(scope="module")
def runs(worlds, folder) -> dict[str, str]:
    """The printed lines of runs on the store with pretrained weights, and on text, by output folder."""
    choices = {"tuned": (ModelConfig(pretrained=Path("weights")), "store"), "bytes": (ModelConfig(**SIZES), "text")}
    return {name: worlds(1).run(train, folder, name, *choice)[0] for name, choice in choices.items()}


def exported(*words: object) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        export([str(word) for word in words])
    return printed.getvalue()


def check_export(export_folder: Path, store: Path) -> None:
    """Checks that transformers reads model and tokenizer of an export, with the store's tokens."""
    transformers = pytest.importorskip("transformers")
    expected, actual = TextTokenizer.read(store), transformers.AutoTokenizer.from_pretrained(export_folder)
    ids = actual(TEXT, add_special_tokens=False).input_ids
    assert [*expected.begin_ids, *ids] == expected.encode(TEXT).tolist() and actual.decode(ids) == TEXT
    assert actual.eos_token_id == expected.end_of_document and actual.bos_token_id == expected.begin_ids[0]
    config = transformers.AutoModelForCausalLM.from_pretrained(export_folder).config
    assert (config.eos_token_id, config.bos_token_id) == (expected.end_of_document, expected.begin_ids[0])


def test_exports_of_a_store_have_its_tokenizer(runs, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = exported(folder / "tuned" / STEP, "exported")
    assert line.startswith("exported: ") and "float32" in line and f"tokenizer of {folder}/store" in line
    assert "exported to tuned/export/step-1: tokenizer of store" in runs["tuned"]
    for place in (tmp_path / "exported", folder / "tuned/export/step-1"):
        check_export(place, folder / "store")


def generated(folder: Path, source: Path, **options: object) -> list[tuple[list[int], str]]:
    with chdir(folder), redirect_stdout(io.StringIO()):
        lines = generate(Generate(source, (TEXT,), tokens=3, device="cpu", stop=False, **options))
    return [(line.prompt_ids, line.text) for line in lines]


def test_generation_finds_the_tokenizer_of_a_run_from_any_folder(worlds, runs, folder, tmp_path):
    tokenizer = TextTokenizer.read(folder / "store")
    expected = worlds(1).run(generated, folder, Path("tuned"))[0]
    assert expected[0][0] == tokenizer.encode(TEXT).tolist()
    assert worlds(1).run(generated, tmp_path, folder / "tuned")[0] == expected
    assert worlds(1).run(generated, tmp_path, folder / "tuned/export/step-1")[0] == expected


def test_exports_without_a_tokenizer_say_why(runs, folder, tmp_path):
    line = exported(folder / "bytes" / STEP, tmp_path / "exported")
    assert "no tokenizer, since tokens are bytes; token 256 ends a text" in line
    assert json.loads((tmp_path / "exported/config.json").read_text())["eos_token_id"] == 256
    assert "no tokenizer, since tokens are bytes" in runs["bytes"]
    run = shutil.copytree(folder / "tuned", tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    for data, reason in {"gone": f"{tmp_path}/gone does not exist", None: "the run has no config.json"}.items():
        (run / "config.json").unlink()
        if data is not None:
            (run / "config.json").write_text(json.dumps(config | {"data": {"path": [str(tmp_path / data)]}}))
        assert f"no tokenizer: {reason}" in exported(run / STEP, tmp_path / f"hf {data}")
        # The store may be named instead.
        line = exported(run / STEP, tmp_path / f"hf {data}", "--overwrite", "--pretrained", folder / "store")
        assert f"tokenizer of {folder}/store" in line
        check_export(tmp_path / f"hf {data}", folder / "store")


def test_the_tokenizer_of_a_run_is_that_of_its_folder_or_data(folder):
    store, text = folder / "store", folder / "text"
    for source, path in {
        TokenSource(store, (text,)): store,  # a pretrained folder with a tokenizer
        TokenSource(folder / "weights", (store,)): store,
        TokenSource(folder / "gone", (store,)): store,
        TokenSource(None, (folder / "gone", store)): store,
        TokenSource(None, (text,)): None,
        TokenSource(folder / "weights", (text,)): None,
        TokenSource(folder / "weights", ()): None,
        TokenSource(None, ()): None,
    }.items():
        tokenizer, actual = source.tokenizer()
        assert actual == path and isinstance(tokenizer, ByteTokenizer if path is None else TextTokenizer)
