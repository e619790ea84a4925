"""Checks of a configuration before anything is started."""

from __future__ import annotations

from importlib.util import find_spec
from math import isfinite

import torch

from armillary.attention.parts import check_kernel_name
from armillary.attention.plans import MethodOptions, named_method
from armillary.train.config.limits import check_limits
from armillary.train.config.model_sizes import model_config
from armillary.train.config.sections import Config, LogConfig, OptimizerConfig
from armillary.train.lr_schedule import warmup_of


def check_config(config: Config) -> None:
    """Checks all fields and their combinations, on every rank. Communicates nothing.

    Raises:
        ValueError: names the flag, its value and the accepted values.
    """
    check_limits(config)
    check_data(config)
    check_parallel(config)
    check_states(config)
    check_schedule(config.optimizer, config.train.steps)
    # `LlamaConfig` would round dim / heads down.
    if config.model.pretrained is None and config.model.dim % config.model.heads and config.model.head_dim is None:
        raise ValueError(
            f"--model.dim {config.model.dim} is not a multiple of --model.heads {config.model.heads}; "
            "make it one, or set --model.head-dim"
        )
    # The model's own checks. The vocabulary may be known only once the data are open; 1 stands for it here.
    model_config(config.model, config.model.vocab_size or 1, config.data.sequence_length)


def check_data(config: Config) -> None:
    """Checks the weights of `data.path`, and that the global batch divides evenly among replicas and micro-batches."""
    data, parallel, accumulation = config.data, config.parallel, config.train.accumulation
    if data.weights and len(data.weights) != len(data.path):
        counts = f"{len(data.weights)} numbers for {len(data.path)} paths"
        raise ValueError(f"--data.weights has {counts}; give one for each of --data.path")
    if not all(weight > 0 and isfinite(weight) for weight in data.weights):
        raise ValueError(f"--data.weights {' '.join(map(str, data.weights))}: all must be finite and above 0")
    if data.global_batch_size % (config.replicas * accumulation):
        times = "" if accumulation == 1 else f", {accumulation} times in a step"
        raise ValueError(
            f"--data.global-batch-size {data.global_batch_size} cannot be shared by replicate {parallel.replicate} x "
            f"shard {parallel.shard}{times}; make it a multiple of {config.replicas * accumulation}"
        )


def check_parallel(config: Config) -> None:
    """Checks the names of method and kernel, flags that exclude each other, and that each shard gets a token."""
    parallel, length = config.parallel, config.data.sequence_length
    named_method(parallel.attention, MethodOptions(nodes=parallel.nodes))
    check_kernel_name("--parallel.kernel", parallel.kernel)
    if config.cuda.sm_margin and parallel.compiler is not None:
        raise ValueError(
            f"--cuda.sm-margin {config.cuda.sm_margin}: a compiled graph finds a kernel by its name, which has no "
            "margin; leave it out, or --parallel.compiler"
        )
    if parallel.cp is not None and (parallel.ring, parallel.ulysses) != (None, None):
        raise ValueError(
            f"--parallel.cp {parallel.cp} is split into ring and ulysses; give either it, or --parallel.ring and "
            "--parallel.ulysses (none: not given)"
        )
    # Axes that are not given may still get ranks; then the layout refuses a sequence that is too short for them.
    shards = parallel.cp or (parallel.ring or 1) * (parallel.ulysses or 1)
    if length < shards:
        raise ValueError(
            f"--data.sequence-length {length}: a sequence of {length} tokens is shorter than its {shards} shards; make "
            "it longer, or use fewer ranks on ring and ulysses"
        )


def check_states(config: Config) -> None:
    """Raises ValueError for options that layers with a state do not support."""
    mixers, layout = config.model.mixers, config.data.layout
    if layout == "striped" and not {*mixers} <= {"attention"}:
        raise ValueError(
            f"--data.layout striped with --model.mixers {' '.join(mixers)}: a state runs along neighbouring tokens; "
            "choose zigzag, contiguous or balanced"
        )
    if config.parallel.contiguous_states and config.parallel.tp > 1:
        raise ValueError(
            f"--parallel.contiguous-states with --parallel.tp {config.parallel.tp}: hidden states are sharded over tp "
            "too, and are not moved; leave one of them out"
        )


def check_schedule(optimizer: OptimizerConfig, steps: int) -> None:
    """Raises ValueError if the decay does not fit into the run, or has no effect under the schedule."""
    decay, steps_after_warmup = optimizer.decay_steps, steps - warmup_of(steps, optimizer)
    if decay is not None and optimizer.schedule != "wsd":
        raise ValueError(f"--optimizer.decay-steps {decay}: for --optimizer.schedule wsd, not {optimizer.schedule}")
    if decay is not None and not 1 <= decay <= steps_after_warmup:
        raise ValueError(
            f"--optimizer.decay-steps {decay}: must lie in 1..{steps_after_warmup}, the steps after the warm-up; the "
            f"run has {steps}"
        )
    if optimizer.schedule != "constant" and optimizer.min_lr > optimizer.lr:
        raise ValueError(f"--optimizer.min-lr {optimizer.min_lr}: must be at most --optimizer.lr {optimizer.lr}")


def check_log(config: LogConfig, steps: int, device: torch.device) -> None:
    """Checks that logs, profiles and traces can be made of a run of `steps` steps on this device.

    Raises:
        ValueError: a step outside the run, a package that is not installed, or an option of another device.
    """
    for package, is_enabled in {"tensorboard": config.tensorboard, "wandb": config.wandb is not None}.items():
        if is_enabled and find_spec(package) is None:
            raise ValueError(f"--log.{package} needs a package: pip install 'armillary-train[{package}]'")
    if config.trace_steps and config.trace is None:
        raise ValueError("--log.trace-steps: name the file too, as --log.trace FILE")
    steps_by_flag = {
        "profile": config.profile,
        "trace-steps": config.trace_steps,
        "memory-snapshot": config.memory_snapshot,
    }
    for name, chosen_steps in steps_by_flag.items():
        outside = [step for step in chosen_steps if not 1 <= step <= steps]
        if outside:
            raise ValueError(f"--log.{name}: there is no step {outside[0]}; choose from 1 to {steps}")
    if config.memory_snapshot and device.type != "cuda":
        raise ValueError(
            f"--log.memory-snapshot: only cuda's allocator keeps a history, and the device is {device.type}; "
            "leave it out, or see --log.profile"
        )
