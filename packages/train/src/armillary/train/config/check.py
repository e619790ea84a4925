"""Checks of a configuration before anything is started."""

from __future__ import annotations

from importlib.util import find_spec
from math import isfinite

import torch

from armillary.attention.kernels.choice import check_kernel_name
from armillary.attention.registry import MethodOptions, named_method
from armillary.train.config import Config, LogConfig, OptimizerConfig
from armillary.train.config.limits import check_limits
from armillary.train.lr_schedule import warmup_of
from armillary.train.model import model_config


def check(config: Config) -> None:
    """Refuses values that no run could use, on every rank; communicates nothing.

    Raises:
        ValueError: names the flag, its value and what would do.
    """
    check_limits(config)
    check_data(config)
    check_parallel(config)
    check_tasks(config)
    check_schedule(config.optimizer, config.train.steps)
    if config.model.pretrained is None and config.model.dim % config.model.heads and config.model.head_dim is None:
        raise ValueError(
            f"--model.dim {config.model.dim} is not a multiple of --model.heads {config.model.heads}; "
            "make it one, or set --model.head-dim"
        )
    model_config(config.model, config.model.vocab_size or 1, config.data.sequence_length)


def check_data(config: Config) -> None:
    """Weights of paths, and a global batch that divides evenly."""
    data, parallel, parts = config.data, config.parallel, config.train.accumulation
    if data.weights and len(data.weights) != len(data.path):
        given = f"{len(data.weights)} numbers for {len(data.path)} paths"
        raise ValueError(f"--data.weights has {given}; give one for each of --data.path")
    if not all(weight > 0 and isfinite(weight) for weight in data.weights):
        raise ValueError(f"--data.weights {' '.join(map(str, data.weights))}: all must be above 0")
    if data.global_batch_size % (config.replicas * parts):
        times = "" if parts == 1 else f", {parts} times in a step"
        raise ValueError(
            f"--data.global-batch-size {data.global_batch_size} cannot be shared by replicate {parallel.replicate} x "
            f"shard {parallel.shard}{times}; make it a multiple of {config.replicas * parts}"
        )


def check_parallel(config: Config) -> None:
    """The names of method and kernel, and sequences long enough for their shards."""
    parallel, length = config.parallel, config.data.sequence_length
    named_method(parallel.attention, MethodOptions(nodes=parallel.nodes))
    check_kernel_name("--parallel.kernel", parallel.kernel)
    if config.cuda.sm_margin and parallel.compiler is not None:
        raise ValueError(
            f"--cuda.sm-margin {config.cuda.sm_margin}: a compiled graph finds kernels by name, and none has a margin; "
            "leave it out, or --parallel.compiler"
        )
    if parallel.cp is not None and (parallel.ring, parallel.ulysses) != (None, None):
        raise ValueError(
            f"--parallel.cp {parallel.cp} is split into ring and ulysses; give either it, or --parallel.ring and "
            "--parallel.ulysses (none: not given)"
        )
    shards = parallel.cp or (parallel.ring or 1) * (parallel.ulysses or 1)
    if length < shards:
        raise ValueError(
            f"--data.sequence-length {length}: a sequence of {length} tokens is shorter than its {shards} shards; make "
            "it longer, or use fewer ranks on ring and ulysses"
        )


def check_tasks(config: Config) -> None:
    """Synthetic tasks that can be made."""
    data = config.data
    if data.task is not None and data.path:
        raise ValueError(f"--data.task {data.task} and --data.path {data.path[0]}: train on a task or on text")
    if "recall" in (data.task, *config.validation.tasks) and data.pairs > data.symbols:
        raise ValueError(f"--data.pairs {data.pairs} have a key each; make --data.symbols {data.symbols} as many")


def check_schedule(optimizer: OptimizerConfig, steps: int) -> None:
    """Learning rates that fit into the run."""
    decay, left = optimizer.decay_steps, steps - warmup_of(steps, optimizer)
    if decay is not None and optimizer.schedule != "wsd":
        raise ValueError(f"--optimizer.decay-steps {decay}: of --optimizer.schedule wsd, not {optimizer.schedule}")
    if decay is not None and not 1 <= decay <= left:
        raise ValueError(f"--optimizer.decay-steps {decay}: must lie in 1..{left}, what the warm-up leaves of {steps}")
    if optimizer.schedule != "constant" and optimizer.min_lr > optimizer.lr:
        raise ValueError(f"--optimizer.min-lr {optimizer.min_lr}: must be at most --optimizer.lr {optimizer.lr}")


def check_log(config: LogConfig, steps: int, device: torch.device) -> None:
    """Refuses what cannot be shown of a run of so many steps on this device, or not with what is installed.

    Raises:
        ValueError: names the flag, and what would do.
    """
    for package, asked in {"tensorboard": config.tensorboard, "wandb": config.wandb is not None}.items():
        if asked and find_spec(package) is None:
            raise ValueError(f"--log.{package} needs a package: pip install 'armillary-train[{package}]'")
    if config.trace_steps and config.trace is None:
        raise ValueError("--log.trace-steps: name the file too, as --log.trace FILE")
    asked_steps = {"profile": config.profile, "trace-steps": config.trace_steps}
    for name, chosen in {**asked_steps, "memory-snapshot": config.memory_snapshot}.items():
        never = [step for step in chosen if not 1 <= step <= steps]
        if never:
            raise ValueError(f"--log.{name}: there is no step {never[0]}; choose from 1 to {steps}")
    if config.memory_snapshot and device.type != "cuda":
        raise ValueError(
            f"--log.memory-snapshot: only cuda's allocator keeps a history, and the device is {device.type}; "
            "leave it out, or see --log.profile"
        )
