"""What no run could use is refused before it starts."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from armillary.train.config import Config, LogConfig


def check(config: Config) -> None:
    """Refuses values that no run could use.

    Raises:
        ValueError: names the flag, its value and what would do.
    """
    least = {
        "parallel.replicate": (config.parallel.replicate, 1),
        "parallel.shard": (config.parallel.shard, 1),
        "parallel.tp": (config.parallel.tp, 1),
        "data.sequence-length": (config.data.sequence_length, 1),
        "data.rows": (config.data.rows, 1),
        "model.heads": (config.model.heads, 1),
        "train.steps": (config.train.steps, 1),
        "train.accumulation": (config.train.accumulation, 1),
        "train.bad-steps": (config.train.bad_steps, 1),
        "validation.every": (config.validation.every, 1),
        "validation.batches": (config.validation.batches, 1),
        "save.every": (config.save.every, 1),
        "save.keep-last": (config.save.keep_last, 1),
        "save.keep-every": (1 if config.save.keep_every is None else config.save.keep_every, 1),
        "log.every": (config.log.every, 1),
        "optimizer.warmup-steps": (config.optimizer.warmup_steps, 0),
    }
    for name, (value, minimum) in least.items():
        if value < minimum:
            raise ValueError(f"--{name} {value}: must be at least {minimum}")
    if not 0 < config.data.validation_fraction < 1:
        raise ValueError(f"--data.validation-fraction {config.data.validation_fraction}: must lie between 0 and 1")
    if config.data.weights and len(config.data.weights) != len(config.data.path):
        given = f"{len(config.data.weights)} numbers for {len(config.data.path)} paths"
        raise ValueError(f"--data.weights has {given}; give one for each of --data.path")
    for name, value in {
        "train.timeout-minutes": config.train.timeout_minutes,
        "optimizer.lr": config.optimizer.lr,
        "optimizer.clip-norm": config.optimizer.clip_norm,
    }.items():
        if not value > 0:
            raise ValueError(f"--{name} {value}: must be above 0")
    if config.model.dim % config.model.heads:
        raise ValueError(f"--model.dim {config.model.dim} is not a multiple of --model.heads {config.model.heads}")
    replicas, parts = config.parallel.replicate * config.parallel.shard, config.train.accumulation
    if config.data.rows % (replicas * parts):
        times = "" if parts == 1 else f", {parts} times in a step"
        raise ValueError(
            f"--data.rows {config.data.rows} cannot be shared by replicate {config.parallel.replicate} x shard "
            f"{config.parallel.shard}{times}; make it a multiple of {replicas * parts}"
        )


def check_log(config: LogConfig, steps: int, device: torch.device) -> None:
    """Refuses what cannot be shown of a run of so many steps on this device, or not with what is installed.

    Raises:
        ValueError: names the flag, and what would do.
    """
    for package, asked in {"tensorboard": config.tensorboard, "wandb": config.wandb is not None}.items():
        if asked and find_spec(package) is None:
            raise ValueError(f"--log.{package} needs a package: pip install 'armillary-train[{package}]'")
    for name, chosen in {"profile": config.profile, "memory-snapshot": config.memory_snapshot}.items():
        never = [step for step in chosen if not 1 <= step <= steps]
        if never:
            raise ValueError(f"--log.{name}: there is no step {never[0]}; choose from 1 to {steps}")
    if config.memory_snapshot and device.type != "cuda":
        raise ValueError(
            f"--log.memory-snapshot: only cuda's allocator keeps a history, and the device is {device.type}; "
            "leave it out, or see --log.profile"
        )
