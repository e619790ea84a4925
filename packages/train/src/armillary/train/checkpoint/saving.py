"""One save: from a state dict that does not change meanwhile to a complete checkpoint."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

import torch.distributed.checkpoint as dcp

from armillary.train.checkpoint.manifest import Manifest
from armillary.train.checkpoint.state import State
from armillary.train.runtime.checkpoint import SavePlanner
from armillary.train.runtime.checkpoint.folder import CheckpointFolder
from armillary.train.runtime.checkpoint.writer import CheckedWriter, Written
from armillary.train.runtime.health.ranks import Ranks, errors_as_ours


def save(folder: CheckpointFolder, state: State, manifest: Manifest, ranks: Ranks) -> None:
    """Writes `state` as the checkpoint of `manifest`, whose files and time are found out here. Collective.

    Raises:
        OSError: some rank could not write, and why; nothing is left of the checkpoint then, and others are as they
            were. On every rank.
        RuntimeError: anything else, such as a rank that is missing.
    """
    try:
        ranks.on_first(lambda: folder.begin(manifest.step))
        files = write(folder, state, manifest.step, ranks)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        ranks.on_first(lambda: complete(folder, replace(manifest, files=files, time=now)))
    except BaseException:
        if ranks.rank == 0:
            with suppress(OSError):  # what is left is cleared by the next save of this step, or the next run
                folder.discard(manifest.step)
        raise


def complete(folder: CheckpointFolder, manifest: Manifest) -> None:
    """Makes the written files of this manifest a checkpoint. On one rank."""
    manifest.write(folder.partial(manifest.step))
    folder.complete(manifest.step)


def write(folder: CheckpointFolder, state: State, step: int, ranks: Ranks) -> dict[str, Written]:
    """Each rank writes its files; those of all ranks."""
    writer = CheckedWriter(folder.partial(step), ranks)
    with errors_as_ours():
        dcp.save(state, storage_writer=writer, planner=SavePlanner(), process_group=ranks.group)
    return {name: file for files in ranks.agree(lambda: writer.files.written) for name, file in files.items()}
