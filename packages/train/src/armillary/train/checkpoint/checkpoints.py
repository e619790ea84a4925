"""Saving and restoring of a run's checkpoints.

`Checkpoints` is the interface that the training loop calls: it takes the state of a run (`saved_state`), writes it
while training continues, and commits it with its manifest (`commit`). `restore` reads the newest intact checkpoint, a
`SavedCheckpoint`. The optimizer's settings are not saved: the learning rate follows from the step, and the other
settings from the configuration of the run that resumes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from armillary.core.internal import compat, file_size
from armillary.data.console import one_line
from armillary.models import GPTConfig, LlamaConfig
from armillary.models.internal import describe, meta_model, parameter_shapes, parse
from armillary.train.axes import choose_axes
from armillary.train.checkpoint.output_folder import CheckpointFolder, checkpoint_folder, remove, write_config
from armillary.train.checkpoint.tensors_and_manifest import (
    MANIFEST,
    Damaged,
    Manifest,
    SavedTensors,
    checkpoint_fault,
    describe_tensor,
    is_copy,
    save_tensors,
)
from armillary.train.config.overlay import align_columns, flag, flag_text, flat
from armillary.train.lock import OutputLock
from armillary.train.random_state import random_state, seed_all, set_random_state
from armillary.train.ranks import Ranks, check_shared
from armillary.train.run_tokenizer import TokenSource, export_source
from armillary.train.step import Run
from armillary.train.watchdog import caused_by_peers

# Minimum seconds of waiting that are reported in a line.
NOTICEABLE = 1.0

# Seconds that a save in flight may take to end once a rank is missing.
GRACE = 2.0

State = dict[str, Any]

# Fields that are not among the saved settings: the output folder may be moved between runs.
NOT_SAVED = ("train.output",)


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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._saving is not None:
            # After an error of this rank alone the save in flight may still complete; with a missing rank it cannot.
            peers_failed = isinstance(error, Exception) and caused_by_peers(error)
            self._saving.join(GRACE if peers_failed else self.timeout.total_seconds())
        if error is None:  # after an error, other ranks may still use the group
            self._stager.close()
            self.ranks.close()

    def restore(self) -> int:
        """Restores the newest intact checkpoint; returns its step, 0 if there is none. Writes this run's config.json.

        Raises ValueError on every rank if ranks see different folders, no checkpoint is intact, the newest intact one
        is of another model or of other rows, or a folder may not be read or changed.
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
        state, manifest = saved_state(self.run, self.ranks.rank), self._manifest(step)
        if not self.save_config.asynchronous:
            self._try_to_save(state, manifest)
            return
        # Copies the state to the host, so that the next step may change it while a thread writes.
        if not compat.stager_is_reusable():
            self._stager = DefaultStager(self._staging)
        copy = cast(State, self._stager.stage(state))
        self._saving = Background(f"step-{step}", partial(self._try_to_save, copy, manifest))

    def finish(self, step: int, prune: bool = True) -> Path:
        """Saves the state after `step` unless it is saved, exports the last step if configured, and returns the path.

        Raises:
            OSError: the state cannot be saved or exported; on every rank.
            TimeoutError, RuntimeError: as from `start`.
        """
        self._wait_for_save()
        if self.newest != step:
            self._save(saved_state(self.run, self.ranks.rank), self._manifest(step), prune)
        if self.save_config.export and step >= self.run.config.train.steps:
            self.ranks.on_first(self.lock.fence)
            folder = self.run.config.train.output / "export" / f"step-{step}"
            with ExitStack() as stack:
                # The run's tokenizer, which rank 0 alone copies.
                enter = partial(stack.enter_context, export_source(TokenSource.of(self.run.config)))
                source, tokenizer = self.ranks.on_first(enter)
                self.run.model.save_pretrained(folder, source if self.ranks.rank == 0 else None)
            self.say(f"exported to {folder}: {tokenizer}")
        return self.folder.path_of(step)

    def _manifest(self, step: int) -> Manifest:
        # In the training thread: the state of the training rows changes while a thread writes.
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

    def _try_to_save(self, state: State, manifest: Manifest) -> None:
        try:
            self._save(state, manifest)
        except OSError as error:  # other errors, such as a missing rank, end the run
            failed = f"step-{manifest.step} could not be saved: {error}"
            self.say(f"{failed}; training continues, and earlier checkpoints are kept")

    def _save(self, state: State, manifest: Manifest, prune: bool = True) -> None:
        """Writes `state` as the checkpoint of `manifest`, and removes older ones if `prune`. Collective; in any thread.

        Raises on every rank OSError with the reason if a rank could not write, ValueError for a value that a checkpoint
        cannot hold, and RuntimeError for any other error, such as a missing rank.
        """
        step, folder, ranks = manifest.step, self.folder, self.ranks
        if self.run.device.type == "cuda":
            torch.cuda.set_device(self.run.device)  # in a new thread the current device is GPU 0
        self.report("saving", step)
        try:
            # 1. All ranks write their files to the folder of an incomplete checkpoint.
            ranks.on_first(lambda: folder.begin(step))
            files = save_tensors(folder.partial(step), state, ranks)
            # 2. Rank 0 adds the manifest with all checksums, and renames the folder: the commit.
            now = datetime.now(UTC).isoformat(timespec="seconds")
            ranks.on_first(lambda: commit(folder, replace(manifest, files=files, time=now)))
        except BaseException as error:
            if ranks.rank == 0:
                with suppress(OSError):  # if this fails, the next save of this step or the next run removes the files
                    remove(folder.partial(step))
            if isinstance(error, OSError):
                raise OSError(f"{folder.path_of(step)}: {error}") from error
            raise
        self.newest = step
        self.report("saved", step)
        # 3. Only now that a newer checkpoint is complete may older ones go.
        if prune and ranks.rank == 0:
            try:
                folder.prune(self.save_config.keep_last, self.save_config.keep_every)
            except OSError as error:
                self.say(f"older checkpoints could not be removed: {error}")

    def _wait_for_save(self) -> None:
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
        # `_try_to_save` has only printed an OSError. Other errors are of all ranks, such as a missing one.
        ended_save, self._saving = self._saving, None
        ended_save.raise_error()


def commit(folder: CheckpointFolder, manifest: Manifest) -> None:
    """Adds the manifest to the incomplete checkpoint of its step, and completes the checkpoint. On one rank.

    Raises OSError if a file is missing or has another size than was written, or the folder cannot be changed.
    """
    partial = folder.partial(manifest.step)
    # Files of other hosts are on a file system that may have lost them. Their bytes were written under checksums.
    for name, record in manifest.files.items():
        if (size := file_size(partial / name)) != record.size:
            raise OSError(f"file {name} has {size} of {record.size} bytes")
    manifest.write(partial)
    folder.complete(manifest.step)


def saved_state(run: Run, rank: int) -> State:
    state = training_state(run)
    optimizer = {"state": state["optimizer"]["state"]}
    return {"model": state["model"], "optimizer": optimizer, "random": {f"rank-{rank}": random_state(run.device)}}


def training_state(run: Run) -> State:
    """Returns the state dicts of model and optimizer, whose state is created if there has been no step."""
    if not run.optimizer.state:
        get_optimizer_state_dict(run.model, run.optimizer)  # torch creates the state by a step with learning rate 0
        for values in run.optimizer.state.values():
            values["step"].zero_()  # AdamW's own count, which must not include that step
    model, optimizer = get_state_dict(run.model, run.optimizer)
    return {"model": model, "optimizer": optimizer}


def model_description(run: Run) -> dict[str, Any]:
    # Through JSON, which turns tuples into lists: a manifest that was read from a file has lists too.
    return json.loads(json.dumps(describe(run.model.config, torch.float32)))


def settings(run: Run, ranks: int) -> dict[str, str]:
    """Returns the fields of a run's configuration as texts, by flag without the leading dashes, and `ranks`."""
    # Mesh axes and device are the actual ones, also if the configuration leaves the choice open.
    flags = {flag(name): flag_text(value) for name, value in flat(run.config) if name not in NOT_SAVED}
    axes = {f"parallel.{axis}": str(size) for axis, size in choose_axes(run.config, ranks).items()}
    return flags | axes | {"train.device": run.device.type, "ranks": str(ranks)}


def restore(run: Run, folder: CheckpointFolder, ranks: Ranks, say: Callable[[str], None]) -> Manifest | None:
    """Restores the newest intact checkpoint; returns its manifest, None if there are no checkpoints. Collective.

    Raises:
        ValueError: no checkpoint is intact, or the newest intact one is of another model or of other rows; on every
            rank. Complete checkpoints and the model are then unchanged. Also if tensors cannot be read; the model may
            then be partly loaded.
        OSError: the folder cannot be changed; on every rank.
    """
    ranks.on_first(folder.clear)  # incomplete checkpoints
    checkpoint = SavedCheckpoint.newest(folder, ranks, "; name another --train.output to start anew")
    if checkpoint is None:
        return None
    path, manifest, tensors = checkpoint.path, checkpoint.manifest, checkpoint.tensors
    # 1. Checks come before any change: a run that is refused must leave damaged checkpoints where they are. DCP's
    # state dict has the optimizer's settings (`param_groups`), which a checkpoint has not.
    state = training_state(run)
    param_groups = state["optimizer"].pop("param_groups")
    current = {name: describe_tensor(x.shape, x.dtype) for name, x in flat(state) if isinstance(x, Tensor)}
    difference = first_differences(manifest.model, model_description(run)) or first_differences(
        tensors.describe("model.", "optimizer.state."), current
    )
    if difference:
        raise ValueError(
            f"{path} was made by another model: {difference}; name another --train.output, or the model that made it"
        )
    try:
        run.training.load_state_dict(manifest.loader)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; name another --train.output, or the data that it was made with") from error
    # 2. Damaged checkpoints get another name, so that training can save these steps again.
    for step, fault in checkpoint.newer_faults.items():
        damaged_path = ranks.on_first(lambda step=step: folder.set_aside(step, is_copy(folder, step)))
        say(f"step-{step}: {fault}; kept as {damaged_path}, resuming from step-{manifest.step}")
    # 3. Tensors are loaded last, since loading overwrites the model in place. All generators are seeded first, for
    # those whose state the checkpoint lacks: all of them if another number of ranks saved it.
    seed_all(run.config.train.seed, manifest.step, ranks.rank)
    prefix, random = f"random.rank-{ranks.rank}.", random_state(run.device)
    saved = tensors.describe(prefix) if manifest.ranks == ranks.size else {}
    random = {name: x for name, x in random.items() if saved.get(prefix + name) == describe_tensor(x.shape, x.dtype)}
    try:
        ranks.on_all(lambda: tensors.fill({**state, "random": {f"rank-{ranks.rank}": random}}))
        optimizer = {**state["optimizer"], "param_groups": param_groups}
        set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=optimizer)
        ranks.on_all(lambda: set_random_state(random, run.device))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; move it to another folder to resume without it") from error
    # 4. Print what the configuration changes.
    before, after = manifest.settings, settings(run, ranks.size)
    names = [name for name in after if before.get(name, after[name]) != after[name]]
    changes = align_columns([(name, one_line(before[name]), after[name]) for name in names])
    say("\n  ".join([f"resuming from {path}", *changes]))
    return manifest


# -- the newest intact checkpoint --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint with verified checksums and headers, and the faults of newer ones by step."""

    path: Path
    manifest: Manifest
    tensors: SavedTensors
    newer_faults: Mapping[int, str] = field(default_factory=dict[int, str])

    @classmethod
    def open(cls, folder: CheckpointFolder, step: int, ranks: Ranks) -> SavedCheckpoint:
        """Verifies every byte of a checkpoint. Collective.

        Raises `Damaged` if it is not intact, ValueError if it has another format or may not be read.
        """
        # Checksums need every byte, so ranks share the files. Headers are small: one rank reads and sends them all.
        faults = ranks.on_all(lambda: checkpoint_fault(folder, step, ranks.rank, ranks.size))
        path = folder.path_of(step)

        def read_headers() -> tuple[Manifest, SavedTensors] | str:
            try:
                manifest = Manifest.read(path)
                return manifest, SavedTensors(path, manifest.files)
            except Damaged as damage:
                return str(damage)

        answer = next(filter(None, faults), None) or ranks.on_first(read_headers)
        if isinstance(answer, str):
            raise Damaged(answer)
        manifest, tensors = answer
        tensors.folder = path  # hosts may mount the same folder in different places
        return cls(path, manifest, tensors)

    @classmethod
    def newest(cls, folder: CheckpointFolder, ranks: Ranks, advice: str = "") -> SavedCheckpoint | None:
        """Verifies checkpoints, newest first, until one is intact; returns None if there are none. Collective.

        Raises ValueError, which ends with `advice`, if none is intact; also for another format, and without permission.
        """
        # Only damage leads to an older checkpoint. After any other error the newest one may be intact, and training
        # again from an older one would overwrite it.
        faults: dict[int, str] = {}
        for step in reversed(ranks.on_first(folder.steps)):
            try:
                return replace(cls.open(folder, step, ranks), newer_faults=faults)
            except Damaged as damage:
                faults[step] = str(damage)
        if faults:
            reasons = "; ".join(f"step-{step}: {fault}" for step, fault in faults.items())
            raise ValueError(f"no checkpoint in {folder.path} is intact ({reasons}){advice}")
        return None

    def config(self) -> LlamaConfig | GPTConfig:
        """Returns the model's config. Raises ValueError if it is invalid or does not have the saved tensors."""
        source = f"{self.path / MANIFEST}: model"
        try:
            config = parse(self.manifest.model)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
        saved = self.tensors.describe("model.")
        # A manifest can state any number of layers. `parameter_shapes` builds the names of all, so the number is
        # checked first: a layer has at least one tensor.
        if config.layers > len(saved):
            raise ValueError(f"{source}: {config.layers} layers, but {len(saved)} tensors were saved")
        shapes = parameter_shapes(meta_model, config)
        expected = {f"model.{name}": describe_tensor(shape, torch.float32) for name, shape in shapes.items()}
        if difference := first_differences(saved, expected):
            raise ValueError(f"{source}: the saved tensors are of another model ({difference})")
        return config


def first_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    # A name that only one side has differs from one whose value is None.
    names = [n for n in {**saved, **current} if (n in saved, saved.get(n)) != (n in current, current.get(n))]
    lines = [f"{name} is {saved.get(name, 'absent')} there and {current.get(name, 'absent')} here" for name in names]
    suffix = f", and {len(lines) - 3} more" if len(lines) > 3 else ""
    return ", ".join(lines[:3]) + suffix


class Background(Thread):
    """A daemon thread that runs `work`, started by the constructor."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        # When the main thread fails, the process must not wait for `work`, which may wait for missing ranks.
        super().__init__(name=name, daemon=True)
        self.work, self.error = work, None
        self.start()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error

    def raise_error(self) -> None:
        """Raises the error of `work`, if there was one. Call it when the thread has ended."""
        if self.error is not None:
            raise self.error
