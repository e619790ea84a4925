"""Writing one checkpoint, from a state dict that does not change meanwhile."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

import torch.distributed.checkpoint as dcp

from armillary.train.checkpoint.folder import CheckpointFolder
from armillary.train.checkpoint.manifest import Manifest
from armillary.train.checkpoint.planner import SavePlanner
from armillary.train.checkpoint.state import State
from armillary.train.checkpoint.writer import FileRecord, TensorWriter
from armillary.train.runtime.health.ranks import Ranks, errors_as_ours


def save(folder: CheckpointFolder, state: State, manifest: Manifest, ranks: Ranks) -> None:
    """Writes `state` as the checkpoint of `manifest`, whose files and time are filled in here. Collective.

    Raises:
        OSError: a rank could not write, with the reason. The incomplete checkpoint is removed, and others are as they
            were. On every rank.
        ValueError: the state has something that a checkpoint cannot hold; on every rank.
        RuntimeError: anything else, such as a missing rank.
    """
    try:
        ranks.on_first(lambda: folder.begin(manifest.step))
        files = write_files(folder, state, manifest.step, ranks)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        ranks.on_first(lambda: commit(folder, replace(manifest, files=files, time=now)))
    except BaseException:
        if ranks.rank == 0:
            with suppress(OSError):  # the next save of this step, or the next run, removes it
                folder.discard(manifest.step)
        raise


def write_files(folder: CheckpointFolder, state: State, step: int, ranks: Ranks) -> dict[str, FileRecord]:
    """Writes the tensors of all ranks, each its own file; returns the records of all files."""
    writer = TensorWriter(folder.partial(step), ranks)
    with errors_as_ours():
        dcp.save(state, storage_writer=writer, planner=SavePlanner(), process_group=ranks.group)
    return {name: record for files in ranks.agree(lambda: writer.files) for name, record in files.items()}


def commit(folder: CheckpointFolder, manifest: Manifest) -> None:
    """Adds the manifest to the files of its step and makes them a checkpoint. On one rank."""
    manifest.write(folder.partial(manifest.step))
    folder.complete(manifest.step)
