"""What no run could use is refused before it starts."""

from __future__ import annotations

from importlib.util import find_spec
from math import inf, isfinite

import torch

from armillary.attention.build import names
from armillary.train.config import Config, LogConfig, OptimizerConfig
from armillary.train.model import model_config


def check(config: Config) -> None:
    """Refuses values that no run could use, on every rank alike; communicates nothing.

    Raises:
        ValueError: names the flag, its value and what would do.
    """
    check_counts(config)
    check_numbers(config)
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


def check_counts(config: Config) -> None:
    """What is counted; None where the default is not known yet."""
    model, parallel, data, train = config.model, config.parallel, config.data, config.train
    least: dict[str, tuple[int | None, int]] = {
        "model.dim": (model.dim, 1),
        "model.layers": (model.layers, 1),
        "model.heads": (model.heads, 1),
        "model.kv-heads": (model.kv_heads, 1),
        "model.hidden-dim": (model.hidden_dim, 1),
        "model.head-dim": (model.head_dim, 1),
        "model.rope-original-length": (model.rope_original_length, 1),
        "model.vocab-size": (model.vocab_size, 1),
        "parallel.replicate": (parallel.replicate, 1),
        "parallel.shard": (parallel.shard, 1),
        "parallel.ring": (parallel.ring, 1),
        "parallel.ulysses": (parallel.ulysses, 1),
        "parallel.tp": (parallel.tp, 1),
        "parallel.heads-per-stage": (parallel.heads_per_stage, 1),
        "parallel.team": (parallel.team, 1),
        "data.sequence-length": (data.sequence_length, 1),
        "data.rows": (data.rows, 1),
        "optimizer.warmup-steps": (config.optimizer.warmup_steps, 0),
        "validation.every": (config.validation.every, 1),
        "validation.batches": (config.validation.batches, 1),
        "save.every": (config.save.every, 1),
        "save.keep-last": (config.save.keep_last, 1),
        "save.keep-every": (config.save.keep_every, 1),
        "log.every": (config.log.every, 1),
        "data.pairs": (data.pairs, 1),
        "data.symbols": (data.symbols, 1),
        "train.steps": (train.steps, 1),
        "train.accumulation": (train.accumulation, 1),
        "train.bad-steps": (train.bad_steps, 1),
    }
    for name, (value, minimum) in least.items():
        if value is not None and value < minimum:
            raise ValueError(f"--{name} {value}: must be at least {minimum}")


def check_numbers(config: Config) -> None:
    """What is measured. No comparison with a NaN holds."""
    model, optimizer = config.model, config.optimizer
    for name, value, largest in (
        ("train.timeout-minutes", config.train.timeout_minutes, 1e6),
        ("optimizer.lr", optimizer.lr, inf),
        ("optimizer.eps", optimizer.eps, inf),
        ("model.rope-theta", model.rope_theta, inf),
        ("model.rope-factor", model.rope_factor, inf),
    ):
        if value is not None and not (0 < value <= largest and isfinite(value)):
            above = "" if largest == inf else f", and at most {largest:,.0f}"
            raise ValueError(f"--{name} {value}: must be above 0{above}")
    if not optimizer.clip_norm > 0:
        raise ValueError(f"--optimizer.clip-norm {optimizer.clip_norm}: must be above 0; inf clips nothing")
    for name, value in {"weight-decay": optimizer.weight_decay, "min-lr": optimizer.min_lr}.items():
        if not (value >= 0 and isfinite(value)):
            raise ValueError(f"--optimizer.{name} {value}: must be at least 0")
    for name, value in {"beta1": optimizer.beta1, "beta2": optimizer.beta2}.items():
        if not 0 <= value < 1:
            raise ValueError(f"--optimizer.{name} {value}: must be at least 0 and below 1")


def check_data(config: Config) -> None:
    """Shares, and rows that every rank has equally many of."""
    data, parallel, parts = config.data, config.parallel, config.train.accumulation
    if not 0 < data.validation_fraction < 1:
        raise ValueError(f"--data.validation-fraction {data.validation_fraction}: must lie between 0 and 1")
    if data.weights and len(data.weights) != len(data.path):
        given = f"{len(data.weights)} numbers for {len(data.path)} paths"
        raise ValueError(f"--data.weights has {given}; give one for each of --data.path")
    if not all(weight > 0 and isfinite(weight) for weight in data.weights):
        raise ValueError(f"--data.weights {' '.join(map(str, data.weights))}: all must be above 0")
    if data.rows % (config.replicas * parts):
        times = "" if parts == 1 else f", {parts} times in a step"
        raise ValueError(
            f"--data.rows {data.rows} cannot be shared by replicate {parallel.replicate} x shard "
            f"{parallel.shard}{times}; make it a multiple of {config.replicas * parts}"
        )


def check_parallel(config: Config) -> None:
    """Names, and sequences that are long enough for as many ranks as are asked for."""
    parallel, length = config.parallel, config.data.sequence_length
    if parallel.attention not in names():
        raise ValueError(f"no attention method {parallel.attention!r}; known: {', '.join(names())}")
    shards = (parallel.ring or 1) * (parallel.ulysses or 1)
    if length < shards:
        raise ValueError(
            f"--data.sequence-length {length}: a sequence of {length} tokens is shorter than its {shards} shards; make "
            "it longer, or use fewer ranks on ring and ulysses"
        )


def check_tasks(config: Config) -> None:
    """Tasks that have rows."""
    data = config.data
    if data.task is not None and data.path:
        raise ValueError(f"--data.task {data.task} and --data.path {data.path[0]}: train on a task or on text")
    if "recall" in (data.task, *config.validation.tasks) and data.pairs > data.symbols:
        raise ValueError(f"--data.pairs {data.pairs} have a key each; make --data.symbols {data.symbols} as many")


def check_schedule(optimizer: OptimizerConfig, steps: int) -> None:
    """Learning rates that fit into the run."""
    decay, left = optimizer.decay_steps, steps - min(optimizer.warmup_steps, steps)
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
