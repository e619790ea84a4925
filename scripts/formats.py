"""Writes a store, a checkpoint and an exported model with this version, for `tests/test_formats.py` to read forever.

    uv run python scripts/formats.py     # writes tests/formats/VERSION, before a release

Takes half a minute. The files come from the commands as a user runs them; `expected.json` has what they contain.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from armillary.models import Llama

ROOT = Path(__file__).parent.parent
TEXTS = {
    "rings": "Rings within rings, each turning on its own axis.\n" * 40,
    "sphere": "The armillary sphere shows the circles of the heavens.\n" * 30,
}
SIZES = {"dim": 16, "layers": 2, "heads": 4, "kv-heads": 2, "hidden-dim": 24}
RUN = "--data.sequence-length 64 --parallel.ring 2 --train.device cpu --validation.batches 1 --log.no-plot"
TRAIN = ("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "armillary.train")


def main() -> None:
    folder = ROOT / "tests/formats" / version("armillary")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "texts").mkdir(parents=True)
    for name, text in TEXTS.items():
        (folder / f"texts/{name}.txt").write_text(text)
    run(folder, "armillary-data", "prepare", "texts", "--output", "store", "--tokenizer", "bpe", "--vocab-size", "300")
    shutil.rmtree(folder / "texts")
    sizes = [word for name, size in SIZES.items() for word in (f"--model.{name}", str(size))]
    options = [*RUN.split(), *sizes, "--data.path", "store", "--train.output", "run", "--save.every", "4"]
    run(folder, *TRAIN, *options, "--train.steps", "4")
    run(folder, "armillary-export", "run/checkpoint/step-4", "model")
    shutil.copytree(folder / "run", folder / "resumed")
    run(folder, *TRAIN, "--config", "run/config.json", "--train.steps", "6", "--train.output", "resumed")
    expected = {
        "texts": sorted(TEXTS.values()),
        "losses": losses(folder / "resumed"),
        "logits": logits(folder / "model"),
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    config = folder / "run/config.json"
    config.write_text(config.read_text().replace(f"{folder}/", ""))
    for path in (folder / "resumed", folder / "run/lock"):  # a lock names this host
        shutil.rmtree(path)


def run(folder: Path, command: str, *arguments: str) -> None:
    subprocess.run([Path(sys.executable).with_name(command), *arguments], cwd=folder, check=True)


def losses(run: Path) -> list[float]:
    """The losses of all steps of a run."""
    records: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "grad_norm" in record]


def logits(model: Path) -> list[float]:
    """The logits of the last of some tokens."""
    with torch.no_grad():
        return Llama.from_pretrained(model)(torch.arange(3, 20)[None])[0, -1].tolist()


if __name__ == "__main__":
    main()
