"""Converts a checkpoint to a Hugging Face folder, in one process: `armillary-export`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from armillary.data import is_store
from armillary.data.console import exit_on_error, parse, print_lines
from armillary.models.internal import CONFIG, hub
from armillary.train.checkpoint.checkpoints import SavedCheckpoint
from armillary.train.checkpoint.tensors_and_manifest import Damaged, Manifest, SavedTensors, file_fault
from armillary.train.run_tokenizer import TokenSource, export_source

PROGRAM = "armillary-export"


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
    """Hugging Face folder or token store with the tokenizer; by default that of the run's pretrained folder or data."""


def export(options: Export) -> None:
    """Writes the Hugging Face folder, and prints a line about it.

    Raises ValueError if there is no intact checkpoint, or `pretrained` is no Hugging Face folder and no store; OSError.
    """
    tokens = token_source(options)
    try:
        manifest = Manifest.read(options.checkpoint)
    except Damaged as damage:
        raise ValueError(f"{options.checkpoint}: {damage}; give the folder of a checkpoint, step-N") from damage
    # Verifies checksums first, because the reader would accept changed weights.
    if fault := file_fault(manifest.files, options.checkpoint):
        raise ValueError(f"{options.checkpoint}: {fault}")
    dtype = None if options.dtype == "as saved" else getattr(torch, options.dtype)
    try:
        tensors = SavedTensors(options.checkpoint, manifest.files)
        weights = tensors.read("model", dtype)
    except (Damaged, ValueError, OSError) as error:
        raise ValueError(f"{options.checkpoint}: {error}") from error
    config = SavedCheckpoint(options.checkpoint, manifest, tensors).config()
    with export_source(tokens) as (source, tokenizer):
        hub.save(options.folder, config, weights, source)
    count, dtype = sum(x.numel() for x in weights.values()), next(iter(weights.values())).dtype
    print_lines(f"{options.folder}: {count:,} parameters, {str(dtype).removeprefix('torch.')}; {tokenizer}")


def token_source(options: Export) -> TokenSource:
    run = TokenSource.read(Path(os.path.realpath(options.checkpoint)).parent.parent)  # OUTPUT/checkpoint/step-N
    path = options.pretrained
    if path is None:
        return run
    if is_store(path):
        return TokenSource(paths=(path,))
    if not (path / CONFIG).is_file():
        raise ValueError(f"--pretrained {path}: has no {CONFIG}; give a Hugging Face folder, or a token store")
    return replace(run, pretrained=path)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `armillary-export`. Exits with 2 on invalid input."""
    with exit_on_error(PROGRAM):
        export(parse(sys.argv[1:] if argv is None else argv, Export, PROGRAM))
