"""Files of earlier versions, written by `scripts/formats.py`: a store, a checkpoint and an exported model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.data import TextTokenizer, open_store
from armillary.models import Llama
from armillary.train import prepare, process_group, train_loop
from armillary.train.cli import read_command

VERSIONS = sorted(Path(__file__).parent.glob("formats/*"))
each_version = pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)


def expected(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "expected.json").read_text())


@each_version
def test_stores_are_read(folder):
    store = open_store(folder / "store")
    tokenizer = TextTokenizer.read(folder / "store")
    tokens = [torch.as_tensor(store.read(i, 0, int(store.lengths[i]))) for i in range(len(store))]
    texts = [tokenizer.decode(document[document != tokenizer.end_of_document]) for document in tokens]
    assert sorted(texts) == expected(folder)["texts"]


@each_version
def test_exported_models_are_read(folder):
    with torch.no_grad():
        logits = Llama.from_pretrained(folder / "model")(torch.arange(3, 20)[None])[0, -1]
    torch.testing.assert_close(logits, torch.tensor(expected(folder)["logits"]), rtol=1e-4, atol=1e-5)


def resumed(folder: Path, ring: int) -> list[float]:
    """Resumes a copy of the checkpoint on this rank, trains two more steps, and returns the losses of all steps."""
    flags = {"parallel.ring": ring, "train.steps": 6, "data.path": folder / "store", "train.output": folder / "run"}
    words = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
    command, _ = read_command(["--config", str(folder / "run/config.json"), *words])
    with process_group(command.run) as device:
        train_loop(prepare(command.run, device))
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "grad_norm" in record]


@each_version
@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoints_resume(worlds, tmp_path, folder, ranks):
    copy = shutil.copytree(folder, tmp_path / folder.name)
    losses = worlds(ranks).run(resumed, copy, ranks)[0]
    assert losses == pytest.approx(expected(folder)["losses"], rel=1e-4) and len(losses) == 6
