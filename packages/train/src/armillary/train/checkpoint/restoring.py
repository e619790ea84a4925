"""Restores a run from its newest intact checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from armillary.train.checkpoint.folder import CheckpointFolder
from armillary.train.checkpoint.manifest import Manifest, checkpoint_fault, is_copy
from armillary.train.checkpoint.reader import Damaged, TensorReader
from armillary.train.checkpoint.settings import changed_settings, settings
from armillary.train.checkpoint.state import check_model, describe_tensors, load_state, training_state
from armillary.train.run import Run
from armillary.train.runtime.health.ranks import Ranks


@dataclass(frozen=True)
class NewestIntact:
    """The newest intact checkpoint.

    Args:
        step: its step; None if there are no checkpoints.
        faults: by step, the faults of newer checkpoints.
    """

    step: int | None = None
    faults: dict[int, str] = field(default_factory=dict[int, str])


def restore(run: Run, folder: CheckpointFolder, ranks: Ranks, say: Callable[[str], None]) -> Manifest | None:
    """Restores the newest intact checkpoint; returns its manifest, None if there are no checkpoints. Collective.

    Removes incomplete checkpoints; reports and renames damaged ones.

    Raises:
        ValueError: no checkpoint is intact, or the newest intact one is of another model or of other rows; on every
            rank. Complete checkpoints and the model are then unchanged. Also if tensors cannot be read; the model may
            then be partly loaded.
        OSError: the folder cannot be changed; on every rank.
    """
    ranks.on_first(folder.clear)
    newest = newest_intact(folder, ranks, "; name another --train.output to start anew")
    if newest.step is None:
        return None
    # 1. Checks come before any change: a run that is refused must leave damaged checkpoints where they are.
    path = folder.path_of(newest.step)
    manifest = Manifest.read(path)
    tensors = describe_tensors(training_state(run))
    ranks.on_first(lambda: check_model(run, path, manifest, tensors))
    try:
        run.training.load_state_dict(manifest.loader)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; name another --train.output, or the data that it was made with") from error
    # 2. Damaged checkpoints get another name, so that training can save these steps again.
    for step, fault in newest.faults.items():
        damaged_path = ranks.on_first(lambda step=step: folder.set_aside(step, is_copy(folder, step)))
        say(f"step-{step}: {fault}; kept as {damaged_path}, resuming from step-{newest.step}")
    # 3. Tensors are loaded last, since loading overwrites the model in place.
    try:
        load_state(run, path, manifest, ranks)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; move it to another folder to resume without it") from error
    say("\n  ".join([f"resuming from {path}", *changed_settings(manifest.settings, settings(run, ranks.size))]))
    return manifest


def newest_intact(folder: CheckpointFolder, ranks: Ranks, advice: str = "") -> NewestIntact:
    """Verifies checkpoints, newest first, until one is intact. The ranks divide the files among them. Collective.

    Args:
        advice: end of the error message if none is intact.

    Raises:
        ValueError: there are checkpoints, and none is intact; or one has another format, or may not be read.
    """
    faults: dict[int, str] = {}
    for step in reversed(ranks.on_first(folder.steps)):
        fault = find_fault(folder, step, ranks)
        if fault is None:
            return NewestIntact(step, faults)
        faults[step] = fault
    if faults:
        reasons = "; ".join(f"step-{step}: {fault}" for step, fault in faults.items())
        raise ValueError(f"no checkpoint in {folder.path} is intact ({reasons}){advice}")
    return NewestIntact()


def find_fault(folder: CheckpointFolder, step: int, ranks: Ranks) -> str | None:
    """Returns the first fault of a checkpoint, None if it is intact. Collective; each rank verifies its share."""
    # Checksums need every byte, so ranks share the files. Headers are small: one rank reads them all.
    faults = ranks.on_all(lambda: checkpoint_fault(folder, step, ranks.rank, ranks.size))
    return next(filter(None, faults), None) or ranks.on_first(lambda: header_fault(folder.path_of(step)))


def header_fault(path: Path) -> str | None:
    """Returns the reason why files with correct checksums cannot be read as tensors; None if they can."""
    try:
        TensorReader(path, Manifest.read(path).files).read_metadata()
    except Damaged as damage:
        return str(damage)
    return None
