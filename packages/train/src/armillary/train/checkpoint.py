"""Checkpoints in torch's distributed format (DCP), written whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import Optimizer

from armillary.train.config import Config

if TYPE_CHECKING:
    from armillary.train.build import Run


def write_config(config: Config) -> None:
    """Writes the resolved configuration to config.json in the output folder, and so proves that it can be written to.

    Raises:
        ValueError: it cannot; on the ranks that see it.
    """
    folder = config.train.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            partial = folder / "config.json.partial"
            partial.write_text(json.dumps(asdict(config), indent=2, default=str) + "\n")
            partial.replace(folder / "config.json")
    except OSError as error:
        raise ValueError(
            f"--train.output {folder}: cannot be written to ({error.strerror}); name another folder"
        ) from error


class Checkpoints:
    """The checkpoints of a run. Used in a `with` block; every rank must call each method."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self.run, self.say = run, say

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def restore(self) -> int:
        """Puts the run where its newest whole checkpoint left it; the step that is, 0 where there is none."""
        return 0

    def start(self, step: int) -> None:
        """Begins to save the run as it is after `step`."""

    def finish(self, step: int) -> Path:
        """Makes sure that the run as it is after `step` is saved; where."""
        return save_checkpoint(self.run.config.train.output, step, self.run.model, self.run.optimizer)


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
    """Writes model and optimizer to `folder`/checkpoint/step-N, each rank its own shards; all ranks must call it.

    It is written beside its place and renamed when complete, so that a folder of that name is always a whole
    checkpoint. An earlier one of the same step is replaced then, and not before.
    """
    final = folder / "checkpoint" / f"step-{step}"
    partial = final.with_name(f"{final.name}.partial")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": step}
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=partial)
    dist.barrier()
    if dist.get_rank() == 0:
        _replace(partial, final)
    dist.barrier()
    return final


def _replace(new: Path, place: Path) -> None:
    old = place.with_name(f"{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)
