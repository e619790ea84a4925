"""From a checkpoint to a Hugging Face folder, on one process: `armillary-export`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from armillary.data.console.exit import ending
from armillary.data.parsing import parse
from armillary.models import hub
from armillary.models.hub.folder import CONFIG, read_json
from armillary.train.checkpoint.manifest import Manifest
from armillary.train.checkpoint.state import saved_config
from armillary.train.runtime.checkpoint.files import file_fault
from armillary.train.runtime.checkpoint.metadata import Damaged
from armillary.train.runtime.checkpoint.reader import read_tensors

PROGRAM = "armillary-export"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Export:
    """Writes a checkpoint as a Hugging Face folder: config.json, safetensors, and the tokenizer that it began with.

    Two ways to start:
      # as it was saved
      armillary-export outputs/checkpoint/step-80 exported
      # in half the bytes, with the tokenizer of a folder
      armillary-export outputs/checkpoint/step-80 exported --dtype bfloat16 --pretrained path/to/folder

    Takes as much memory as the weights have bytes in `dtype`, and that of one file.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A folder such as outputs/checkpoint/step-80."""
    folder: Annotated[Path, tyro.conf.Positional]
    """Where to; it is made if need be."""
    dtype: Literal["as saved", "float64", "float32", "bfloat16", "float16"] = "as saved"
    """Of the weights that are written."""
    pretrained: Path | None = None
    """Hugging Face folder that the run began with, for its tokenizer and the ids of special tokens; by default the one
    that the run's config.json names."""


def export(asked: Export) -> None:
    """Does it.

    Raises:
        ValueError: no checkpoint, or a damaged one.
        OSError: something could not be written.
    """
    if asked.pretrained is not None and not (asked.pretrained / CONFIG).is_file():
        raise ValueError(f"--pretrained {asked.pretrained}: holds no {CONFIG}; give a Hugging Face folder")
    try:
        manifest = Manifest.read(asked.checkpoint)
    except Damaged as damage:
        raise ValueError(f"{asked.checkpoint}: {damage}; give the folder of a checkpoint, step-N") from damage
    if fault := file_fault(manifest.files, asked.checkpoint):
        raise ValueError(f"{asked.checkpoint}: {fault}")
    try:
        weights = read_tensors(asked.checkpoint, "model", DTYPES.get(asked.dtype))
    except (Damaged, ValueError, OSError) as error:
        raise ValueError(f"{asked.checkpoint}: {error}") from error
    config = saved_config(asked.checkpoint, manifest)
    hub.save(asked.folder, config, weights, asked.pretrained or pretrained_of(asked.checkpoint))


def pretrained_of(checkpoint: Path) -> Path | None:
    """The folder that the run of a checkpoint began with, as `--save.export` has it; None where it began with none.

    If it is gone, that is said, and nothing is taken from it.
    """
    path = checkpoint.resolve().parent.parent / "config.json"
    found = read_json(path).get("model") if path.is_file() else None
    named = found.get("pretrained") if isinstance(found, dict) else None
    if not isinstance(named, str):
        return None
    if not Path(named).is_dir():
        why = f"{path} says that the run began with {named}, and it is not there; name it by --pretrained"
        print(f"{PROGRAM}: no tokenizer, and no ids of special tokens: {why}", file=sys.stderr)
        return None
    return Path(named)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and exports; exits with 2 for what cannot be, with one line that says why."""
    with ending(PROGRAM):
        export(parse(sys.argv[1:] if argv is None else argv, Export, PROGRAM))
