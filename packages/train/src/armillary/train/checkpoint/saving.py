"""Writes one checkpoint, from a state dict that stays constant until it is written."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

import torch.distributed.checkpoint as dcp

from armillary.train.checkpoint.folder import CheckpointFolder
from armillary.train.checkpoint.manifest import Manifest
from armillary.train.checkpoint.planner import SavePlanner
from armillary.train.checkpoint.state import State
from armillary.train.checkpoint.writer import TensorWriter
from armillary.train.runtime.health.ranks import Ranks, convert_dcp_errors


def save(folder: CheckpointFolder, state: State, manifest: Manifest, ranks: Ranks) -> None:
    """Writes `state` as the checkpoint of `manifest`, whose files and time are filled in here. Collective.

    Raises:
        OSError: a rank could not write, with the reason; on every rank. The incomplete checkpoint is removed, and
            earlier ones are unchanged.
        ValueError: the state has a value that a checkpoint cannot hold; on every rank.
        RuntimeError: any other error, such as a missing rank.
    """
    writer = TensorWriter(folder.partial(manifest.step), ranks)
    try:
        # 1. All ranks write their files to the folder of an incomplete checkpoint.
        ranks.on_first(lambda: folder.begin(manifest.step))
        with convert_dcp_errors():
            dcp.save(state, storage_writer=writer, planner=SavePlanner(), process_group=ranks.group)
        # 2. Rank 0 adds the manifest with all checksums, and renames the folder: the commit.
        now = datetime.now(UTC).isoformat(timespec="seconds")
        ranks.on_first(lambda: commit(folder, replace(manifest, files=writer.files, time=now)))
    except BaseException:
        if ranks.rank == 0:
            with suppress(OSError):  # if this fails, the next save of this step or the next run removes the files
                folder.discard(manifest.step)
        raise


def commit(folder: CheckpointFolder, manifest: Manifest) -> None:
    """Adds the manifest to the incomplete checkpoint of its step, and completes the checkpoint. On one rank."""
    manifest.write(folder.partial(manifest.step))
    folder.complete(manifest.step)
