"""Converts a checkpoint to a Hugging Face folder, in one process: `armillary-export`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from armillary.data.console.exit import exit_on_error
from armillary.data.parsing import parse
from armillary.models import hub
from armillary.models.hub.folder import CONFIG, read_json
from armillary.train.checkpoint.files import file_fault
from armillary.train.checkpoint.manifest import Manifest
from armillary.train.checkpoint.reader import Damaged, read_tensors
from armillary.train.checkpoint.state import saved_config

PROGRAM = "armillary-export"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Export:
    """Writes a checkpoint as a Hugging Face folder: config.json, safetensors, and the tokenizer.

    Two ways to start:
      # in the saved dtype
      armillary-export outputs/checkpoint/step-80 exported
      # in half the bytes, with the tokenizer of a folder
      armillary-export outputs/checkpoint/step-80 exported --dtype bfloat16 --pretrained path/to/folder

    Needs memory for the weights in `dtype`, and for one file of the checkpoint.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A folder such as outputs/checkpoint/step-80."""
    folder: Annotated[Path, tyro.conf.Positional]
    """Created if it does not exist."""
    dtype: Literal["as saved", "float64", "float32", "bfloat16", "float16"] = "as saved"
    """Data type of the written weights."""
    pretrained: Path | None = None
    """Hugging Face folder with tokenizer and ids of special tokens; by default the one that the run started from."""


def export(options: Export) -> None:
    """Writes the Hugging Face folder.

    Raises:
        ValueError: there is no checkpoint, it is damaged, or `pretrained` is not a Hugging Face folder.
        OSError: a file could not be written.
    """
    if options.pretrained is not None and not (options.pretrained / CONFIG).is_file():
        raise ValueError(f"--pretrained {options.pretrained}: has no {CONFIG}; give a Hugging Face folder")
    try:
        manifest = Manifest.read(options.checkpoint)
    except Damaged as damage:
        raise ValueError(f"{options.checkpoint}: {damage}; give the folder of a checkpoint, step-N") from damage
    # Verifies checksums first, because the reader would accept changed weights.
    if fault := file_fault(manifest.files, options.checkpoint):
        raise ValueError(f"{options.checkpoint}: {fault}")
    try:
        weights = read_tensors(options.checkpoint, manifest.files, "model", DTYPES.get(options.dtype))
    except (Damaged, ValueError, OSError) as error:
        raise ValueError(f"{options.checkpoint}: {error}") from error
    config = saved_config(options.checkpoint, manifest)
    hub.save(options.folder, config, weights, options.pretrained or pretrained_of(options.checkpoint))


def pretrained_of(checkpoint: Path) -> Path | None:
    """Returns the pretrained folder in the config.json of a checkpoint's run, or None.

    Prints a line and returns None if that folder no longer exists.
    """
    path = checkpoint.resolve().parent.parent / "config.json"  # OUTPUT/checkpoint/step-N
    model = read_json(path).get("model") if path.is_file() else None
    pretrained = model.get("pretrained") if isinstance(model, dict) else None
    if not isinstance(pretrained, str):
        return None
    if not Path(pretrained).is_dir():
        reason = f"{path} names {pretrained}, which does not exist; give its path by --pretrained"
        print(f"{PROGRAM}: no tokenizer, and no ids of special tokens: {reason}", file=sys.stderr)
        return None
    return Path(pretrained)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `armillary-export`. Exits with 2 on invalid input."""
    with exit_on_error(PROGRAM):
        export(parse(sys.argv[1:] if argv is None else argv, Export, PROGRAM))
