"""The folder of weights and tokenizer: a run's output folder, one of its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from armillary.core.parts import read_json
from armillary.data import ByteTokenizer
from armillary.data.parts import TwoWayTokenizer, has_tokenizer, read_tokenizer
from armillary.models.parts import CONFIG, ends_of_text
from armillary.train.checkpoint.folder import COMPLETE, CheckpointFolder
from armillary.train.tokenizer import TokenSource


@dataclass(frozen=True)
class ModelSource:
    """A model on disk.

    Args:
        folder: a Hugging Face folder, or the output folder of a run.
        checkpoints: checkpoints of a run; None for a Hugging Face folder.
        step: step of the checkpoint; None: the newest intact one.
    """

    folder: Path
    checkpoints: CheckpointFolder | None = None
    step: int | None = None


def find_source(path: Path, step: int | None) -> ModelSource:
    """Returns the model source at `path`.

    Raises:
        ValueError: there is no such folder or step, or the folder has neither a checkpoint nor a Hugging Face config.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder; give the output folder of a run, or a Hugging Face folder")
    # 1. One checkpoint of a run.
    step_name = COMPLETE.fullmatch(path.name)
    if step_name and (path / "manifest.json").exists():
        if step not in (None, int(step_name[1])):
            raise ValueError(f"--step {step}: {path} is step {step_name[1]}; give the run's output folder")
        # The path is OUTPUT/checkpoint/step-N.
        return ModelSource(path.resolve().parent.parent, CheckpointFolder(path.parent), int(step_name[1]))
    # 2. The output folder of a run.
    if (path / "checkpoint").is_dir():
        return ModelSource(path, check_steps(CheckpointFolder(path / "checkpoint"), step), step)
    # 3. A folder with a config.json, which Hugging Face and our runs write with different fields.
    config = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    if "model_type" in config:
        if step is not None:
            raise ValueError(f"--step {step}: {path} is a Hugging Face folder, and has no steps; leave it out")
        return ModelSource(path)
    if "train" in config:
        raise ValueError(f"{path}: the run has no checkpoint yet")
    raise ValueError(f"{path}: holds neither checkpoints of a run (checkpoint/step-N) nor a Hugging Face {CONFIG}")


def check_steps(folder: CheckpointFolder, step: int | None) -> CheckpointFolder:
    """Returns the folder; raises ValueError if it has no checkpoint, or not this step."""
    steps = folder.steps()
    if not steps:
        raise ValueError(f"{folder.path}: no checkpoint in it yet")
    if step is not None and step not in steps:
        raise ValueError(f"--step {step}: {folder.path} has {', '.join(map(str, steps))}")
    return folder


def find_tokenizer(source: ModelSource, name: str | None, begin: str | None) -> TwoWayTokenizer:
    """Returns the tokenizer `name`, by default that of the run or of the Hugging Face folder.

    Args:
        name: tokenizer.json, a folder with one, or "bytes".
        begin: name of a token in front of each prompt; None: as the tokenizer's files say.

    Raises:
        ValueError: no tokenizer is known, or it cannot be read.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name is not None:
        return read_tokenizer(Path(name), begin)
    try:
        if source.checkpoints is not None:
            return TokenSource.read(source.folder).tokenizer(begin)[0]
        if has_tokenizer(source.folder):
            return read_tokenizer(source.folder, begin)
        raise ValueError("the folder has none")
    except ValueError as error:
        advice = "name one by --tokenizer, or give tokens by --ids"
        raise ValueError(f"{source.folder}: no tokenizer is known ({error}); {advice}") from error


def stops_of(source: ModelSource, tokenizer: TwoWayTokenizer | None) -> list[int]:
    """Returns the ids of tokens that end a text: from the Hugging Face folder, else the tokenizer's end of document."""
    if source.checkpoints is None and (ends := ends_of_text(source.folder)) is not None:
        return ends
    return [] if tokenizer is None else [tokenizer.end_of_document]
