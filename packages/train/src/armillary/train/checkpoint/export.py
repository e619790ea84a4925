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
from armillary.models import LlamaConfig
from armillary.models.internal import CONFIG, hub
from armillary.train.checkpoint.checkpoints import SavedCheckpoint
from armillary.train.checkpoint.output_folder import CheckpointFolder
from armillary.train.checkpoint.tensors_and_manifest import MANIFEST, Damaged, Manifest, SavedTensors, file_fault
from armillary.train.run_tokenizer import TokenSource, export_source

PROGRAM = "armillary-export"


@dataclass(frozen=True)
class Export:
    """Writes a checkpoint as a Hugging Face folder: config.json, safetensors, and the tokenizer.

    Two ways to start:
      # the newest step of a run, in the saved dtype
      armillary-export outputs exported
      # another step in half the bytes, with the tokenizer of a folder
      armillary-export outputs/checkpoint/step-80 exported --dtype bfloat16 --pretrained path/to/folder

    Needs memory for the weights in `dtype`, and for one file of the checkpoint.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """Output folder of a run, whose newest checkpoint is taken, or a checkpoint such as outputs/checkpoint/step-80."""
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Created if it does not exist."""
    overwrite: bool = False
    """Write into a folder that has files; it replaces those of a model."""
    dtype: Literal["as saved", "float64", "float32", "bfloat16", "float16"] = "as saved"
    """Data type of the written weights."""
    pretrained: Path | None = None
    """Hugging Face folder or token store with the tokenizer; by default that of the run's pretrained folder or data."""


def export(options: Export) -> None:
    """Writes the Hugging Face folder, and prints a line about it.

    Raises ValueError if there is no intact checkpoint, or `pretrained` is no Hugging Face folder and no store; OSError.
    """
    check_folder(options)
    checkpoint, manifest = open_checkpoint(options.checkpoint)
    tokens = token_source(checkpoint, options.pretrained)
    dtype = None if options.dtype == "as saved" else getattr(torch, options.dtype)
    try:
        tensors = SavedTensors(checkpoint, manifest.files)
        weights = tensors.read("model", dtype)
    except (Damaged, ValueError, OSError) as error:
        raise ValueError(f"{checkpoint}: {error}") from error
    config = SavedCheckpoint(checkpoint, manifest, tensors).config()
    with export_source(tokens) as (source, tokenizer):
        hub.save(options.folder, config, weights, source)
    count, dtype = sum(x.numel() for x in weights.values()), next(iter(weights.values())).dtype
    print_lines(f"{options.folder}: {count:,} parameters, {str(dtype).removeprefix('torch.')}; {tokenizer}")
    if isinstance(config, LlamaConfig) and config.states is not None:
        print_lines(f"{options.folder}: a hybrid, which transformers cannot read; armillary-generate can")


def check_folder(options: Export) -> None:
    """Raises ValueError for a folder that has files, unless it may be overwritten."""
    if not options.overwrite and options.folder.is_dir() and any(options.folder.iterdir()):
        raise ValueError(f"{options.folder}: it has files; name another folder, or add --overwrite")


def open_checkpoint(path: Path) -> tuple[Path, Manifest]:
    """Returns an intact checkpoint and its manifest: the one at `path`, or the newest of the run at `path`.

    Raises ValueError if there is none.
    """
    folder = CheckpointFolder(path / "checkpoint")
    is_run = folder.path.is_dir() and not (path / MANIFEST).exists()
    checkpoints, faults = [folder.path_of(step) for step in reversed(folder.steps())] if is_run else [path], list[str]()
    for checkpoint in checkpoints:
        try:
            manifest = Manifest.read(checkpoint)
        except Damaged as damage:
            faults.append(f"{checkpoint}: {damage}" + ("" if is_run else "; give the folder of a checkpoint, step-N"))
            continue
        # Verifies checksums first, because the reader would accept changed weights.
        fault = file_fault(manifest.files, checkpoint)
        if fault is None:
            if faults:
                print_lines(*(f"{text}; going back to {checkpoint.name}" for text in faults))
            return checkpoint, manifest
        faults.append(f"{checkpoint}: {fault}")
    raise ValueError("; ".join(faults) or f"{folder.path}: no checkpoint in it yet")


def token_source(checkpoint: Path, path: Path | None) -> TokenSource:
    """Returns the source of the tokenizer: `path`, by default that of the run."""
    run = TokenSource.read(Path(os.path.realpath(checkpoint)).parent.parent)  # OUTPUT/checkpoint/step-N
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
