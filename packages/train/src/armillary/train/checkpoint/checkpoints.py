"""Saving and restoring of a run's checkpoints: the interface that the training loop calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from armillary.core.parts import compat, file_size
from armillary.train.checkpoint.folder import CheckpointFolder, checkpoint_folder, remove, write_config
from armillary.train.checkpoint.manifest import Manifest
from armillary.train.checkpoint.state import State, model_description, restore, saved_state, settings
from armillary.train.checkpoint.tensors import save_tensors
from armillary.train.run import Run
from armillary.train.runtime.background import Background
from armillary.train.runtime.health.lock import OutputLock
from armillary.train.runtime.health.ranks import Ranks, check_shared
from armillary.train.runtime.health.watchdog import caused_by_peers
from armillary.train.runtime.random_state import seed_all
from armillary.train.tokenizer import TokenSource, export_source

NOTICEABLE = 1.0
"""Minimum seconds of waiting that are reported in a line."""

GRACE = 2.0
"""Seconds that a save in flight may take to end once a rank is missing."""


class Checkpoints:
    """Saves and restores the checkpoints of a run. A context manager; every rank must call each method.

    A checkpoint contains model, optimizer, step, tokens seen, the state of the training rows, and the random state of
    each rank; the learning rate follows from the step. One checkpoint is written at a time, in a background thread if
    `save.asynchronous`. Collectives of the thread run in a process group of their own (`Ranks`).

    Args:
        lock: lock of the output folder; only the run that holds it may change the folder.
        say: called with lines to print.
        report: called with "saving" or "saved", and the step; also by the background thread.
    """

    def __init__(
        self,
        run: Run,
        lock: OutputLock,
        say: Callable[[str], None],
        report: Callable[[str, int], None] = lambda kind, step: None,
    ) -> None:
        self.run, self.say, self.report, self.save_config = run, say, report, run.config.save
        self.timeout = timedelta(minutes=run.config.train.timeout_minutes)
        self.lock, self.ranks = lock, Ranks(self.timeout)
        self.folder = replace(checkpoint_folder(run.config), run=lock.run, fence=lock.fence)
        # What each manifest says of the run, which does not change.
        self.model, self.settings = model_description(run), settings(run, self.ranks.size)
        self.newest: int | None = None  # step of the newest checkpoint
        self._restored_step, self._restored_tokens = 0, 0  # of the checkpoint that this run resumed from
        self._saving: Background | None = None
        # The stager copies the state to the host; on CUDA through pinned memory, without blocking the host.
        cuda = run.device.type == "cuda"
        self._staging = StagingOptions(
            cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
        )
        self._stager = DefaultStager(self._staging)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._saving is not None:
            # After an error of this rank alone the save in flight may still complete; with a missing rank it cannot.
            peers_failed = isinstance(error, Exception) and caused_by_peers(error)
            self._saving.join(GRACE if peers_failed else self.timeout.total_seconds())
        if error is None:  # after an error, other ranks may still use the group
            self._stager.close()
            self.ranks.close()

    def restore(self) -> int:
        """Restores the newest intact checkpoint; returns its step, 0 if there is none.

        Writes this run's config.json. The random states are restored too if the checkpoint has them for this number of
        ranks, and otherwise seeded from seed, step and rank.

        Raises:
            ValueError: ranks see different folders, no checkpoint is intact, the newest intact one is of another model
                or of other rows, or a folder may not be read or changed. On every rank.
        """
        try:
            check_shared(self.folder.path, self.ranks, "--train.output")
            manifest = restore(self.run, self.folder, self.ranks, self.say)
        except OSError as error:
            raise ValueError(f"--train.output {self.run.config.train.output}: {error}; name another folder") from error
        # After all checks, since a run that is refused must not change the folder.
        self.ranks.on_first(lambda: write_config(self.run.config))
        if manifest is None:
            seed_all(self.run.config.train.seed, 0, self.ranks.rank)
            return 0
        self.newest, self._restored_step, self._restored_tokens = manifest.step, manifest.step, manifest.tokens
        return manifest.step

    def tokens(self, step: int) -> int:
        """Returns the tokens trained on through `step`, over all ranks and restarts."""
        return self._restored_tokens + (step - self._restored_step) * self.run.tokens_per_step

    def start(self, step: int) -> None:
        """Starts to save the state after `step`; training may continue once this returns.

        If the files cannot be written, a line is printed and earlier checkpoints are kept.

        Raises:
            TimeoutError: the previous save does not end.
            RuntimeError: ranks were missing in the previous save, or another run has taken the output folder.
        """
        self._wait_for_save()  # one save in flight at a time
        if not self.save_config.asynchronous:
            self._try_to_save(step, saved_state(self.run, self.ranks.rank), self._manifest(step))
            return
        # Copies the state to the host, so that the next step may change it while a thread writes.
        if not compat.stager_is_reusable():
            self._stager = DefaultStager(self._staging)
        copy = cast(State, self._stager.stage(saved_state(self.run, self.ranks.rank)))
        self._saving = Background(f"step-{step}", partial(self._try_to_save, step, copy, self._manifest(step)))

    def finish(self, step: int, prune: bool = True) -> Path:
        """Saves the state after `step` unless it is saved, and exports the last step if configured.

        Args:
            prune: True: remove older checkpoints that `keep_last` and `keep_every` do not keep.

        Returns:
            The path of the checkpoint.

        Raises:
            OSError: the state cannot be saved or exported; on every rank.
            TimeoutError, RuntimeError: as from `start`.
        """
        self._wait_for_save()
        if self.newest != step:
            self._save(step, saved_state(self.run, self.ranks.rank), self._manifest(step), prune)
        if self.save_config.export and step >= self.run.config.train.steps:
            self.ranks.on_first(self.lock.fence)
            self._export(self.run.config.train.output / "export" / f"step-{step}")
        return self.folder.path_of(step)

    def _export(self, folder: Path) -> None:
        """Writes a Hugging Face folder with the run's tokenizer, which rank 0 alone copies."""
        with ExitStack() as stack:
            enter = partial(stack.enter_context, export_source(TokenSource.of(self.run.config)))
            source, tokenizer = self.ranks.on_first(enter)
            self.run.model.save_pretrained(folder, source if self.ranks.rank == 0 else None)
        self.say(f"exported to {folder}: {tokenizer}")

    def _manifest(self, step: int) -> Manifest:
        """Returns the manifest, for which `save` fills in files and time.

        Runs in the training thread, because the state of the training rows changes while a thread writes.
        """
        return Manifest(
            step=step,
            ranks=self.ranks.size,
            tokens=self.tokens(step),
            loader=self.run.training.state_dict(),
            model=self.model,
            time="",
            files={},
            settings=self.settings,
        )

    def _try_to_save(self, step: int, state: State, manifest: Manifest) -> None:
        """Saves and removes older checkpoints; only prints an OSError."""
        try:
            self._save(step, state, manifest)
        except OSError as error:
            self.say(f"step-{step} could not be saved: {error}; training continues, and earlier checkpoints are kept")

    def _save(self, step: int, state: State, manifest: Manifest, prune: bool = True) -> None:
        """Saves a state, and removes older checkpoints if `prune`. Runs in either thread."""
        if self.run.device.type == "cuda":
            torch.cuda.set_device(self.run.device)  # in a new thread the current device is GPU 0
        self.report("saving", step)
        try:
            save(self.folder, state, manifest, self.ranks)
        except OSError as error:
            raise OSError(f"{self.folder.path_of(step)}: {error}") from error
        self.newest = step
        self.report("saved", step)
        if prune and self.ranks.rank == 0:
            try:
                self.folder.prune(self.save_config.keep_last, self.save_config.keep_every)
            except OSError as error:
                self.say(f"older checkpoints could not be removed: {error}")

    def _wait_for_save(self) -> None:
        """Waits for the save in flight, and raises its error, if it was not an OSError.

        Raises:
            TimeoutError: the save does not end within `timeout`.
        """
        if self._saving is None:
            return
        since = time.monotonic()
        self._saving.join(self.timeout.total_seconds())
        waited_seconds = time.monotonic() - since
        if self._saving.is_alive():
            raise TimeoutError(
                f"rank {self.ranks.rank} has waited {waited_seconds:.0f} s for {self._saving.name} to be written to "
                f"{self.folder.path}"
            )
        if waited_seconds > NOTICEABLE:
            self.say(f"training waited {waited_seconds:.0f} s for {self._saving.name} to be saved")
        ended_save, self._saving = self._saving, None
        ended_save.raise_error()


def save(folder: CheckpointFolder, state: State, manifest: Manifest, ranks: Ranks) -> None:
    """Writes `state` as the checkpoint of `manifest`, whose files and time are filled in here. Collective.

    Raises:
        OSError: a rank could not write, with the reason; on every rank. The incomplete checkpoint is removed, and
            earlier ones are unchanged.
        ValueError: the state has a value that a checkpoint cannot hold; on every rank.
        RuntimeError: any other error, such as a missing rank.
    """
    try:
        # 1. All ranks write their files to the folder of an incomplete checkpoint.
        ranks.on_first(lambda: folder.begin(manifest.step))
        files = save_tensors(folder.partial(manifest.step), state, ranks)
        # 2. Rank 0 adds the manifest with all checksums, and renames the folder: the commit.
        now = datetime.now(UTC).isoformat(timespec="seconds")
        ranks.on_first(lambda: commit(folder, replace(manifest, files=files, time=now)))
    except BaseException:
        if ranks.rank == 0:
            with suppress(OSError):  # if this fails, the next save of this step or the next run removes the files
                remove(folder.partial(manifest.step))
        raise


def commit(folder: CheckpointFolder, manifest: Manifest) -> None:
    """Adds the manifest to the incomplete checkpoint of its step, and completes the checkpoint. On one rank.

    Raises:
        OSError: a file is missing or has another size than was written, or the folder cannot be changed.
    """
    partial = folder.partial(manifest.step)
    # Files of other hosts are on a file system that may have lost them. Their bytes were written under checksums.
    for name, record in manifest.files.items():
        if (size := file_size(partial / name)) != record.size:
            raise OSError(f"file {name} has {size} of {record.size} bytes")
    manifest.write(partial)
    folder.complete(manifest.step)
