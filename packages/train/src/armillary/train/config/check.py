"""Checks of a configuration before anything is started, and the sizes of the configured model."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from math import isfinite

import torch

from armillary.attention.internal import VERIFIERS, MethodOptions, NamedMethod, check_kernel_name, named_method
from armillary.data.console import flag_in_errors
from armillary.models import (
    GPTConfig,
    LatentSizes,
    LinearScaling,
    Llama3Scaling,
    LlamaConfig,
    RopeScaling,
    StateConfig,
    YarnScaling,
    pretrained_config,
)
from armillary.train.config.overlay import check_limits, flag
from armillary.train.config.sections import Config, LogConfig, ModelConfig, OptimizerConfig, ParallelConfig
from armillary.train.optimizer import warmup_of

SIZES = (
    "family",
    "dim",
    "layers",
    "heads",
    "kv_heads",
    "hidden_dim",
    "head_dim",
    "qk_norm",
    "tied_embeddings",
    "mixers",
)
"""Fields that a pretrained folder sets, besides `vocab_size`; recipes and files may only repeat their values."""
# Fields of `LatentSizes` that have a flag, with the prefix `latent_`.
LATENT_SIZES = ("rank", "query_rank", "rotary_dim", "key_dim", "value_dim")
GPT_FIELDS = ("family", "dim", "layers", "heads", "vocab_size", "pretrained")
"""Fields that a GPT has; only a LLaMA has the others."""
# Fields that may be set beside a pretrained folder.
PRETRAINED_FIELDS = ("pretrained", "rope_theta", "rope_scaling", "rope_factor", "rope_original_length")
# Base of RoPE's frequencies, unless `rope_theta` is set.
ROPE_THETA = 10_000.0


def check_config(config: Config) -> None:
    """Checks all fields and their combinations, on every rank. Communicates nothing.

    Raises:
        ValueError: names the flag, its value and the accepted values.
    """
    check_limits(config)
    if config.check.verify_every is not None and not entry_points(group=VERIFIERS):
        raise ValueError(
            f"--check.verify-every {config.check.verify_every}: needs a package: pip install armillary-check"
        )
    check_data(config)
    check_parallel(config)
    check_states(config)
    latent = [name for name in LATENT_SIZES if getattr(config.model, f"latent_{name}") is not None]
    if config.model.latent_rank is None and latent:
        raise ValueError(f"--model.latent-{flag(latent[0])}: it needs --model.latent-rank")
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
    parallel = config.parallel
    with flag_in_errors("--parallel.attention"):
        configured_method(parallel)
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


def configured_method(parallel: ParallelConfig, nodes: int | None = None) -> NamedMethod:
    options = MethodOptions(
        parallel.heads_per_stage, parallel.team, parallel.placement, nodes=parallel.nodes if nodes is None else nodes
    )
    return named_method(parallel.attention, options)


def check_states(config: Config) -> None:
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


# -- the model's sizes ------------------------------------------------------------------------------------------------


def model_config(config: ModelConfig, vocab_size: int, length: int) -> LlamaConfig | GPTConfig:
    """Returns the sizes of the configured model.

    Args:
        vocab_size: V; ignored with a pretrained folder, which states its own.
        length: N, tokens of a row; without a pretrained folder, a GPT gets this number of learned positions.

    Raises:
        ValueError: invalid sizes, fields that the family does not have, or a pretrained folder that is unreadable or
            has other sizes than the fields.
    """
    if config.pretrained is not None:
        return from_folder(config, length)
    if config.family == "gpt":
        check_gpt(config)
        return GPTConfig(
            vocab_size=vocab_size, dim=config.dim, layers=config.layers, heads=config.heads, max_positions=length
        )
    return LlamaConfig(
        vocab_size=vocab_size,
        dim=config.dim,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads if config.latent_rank is None else config.heads,
        hidden_dim=config.hidden_dim,
        head_dim=config.head_dim or 0,
        qk_norm=config.qk_norm,
        tied_embeddings=config.tied_embeddings,
        rope_theta=ROPE_THETA if config.rope_theta is None else config.rope_theta,
        rope_scaling=rope_scaling(config),
        max_positions=length,
        mixers=config.mixers,
        states=state_config(config),
        latent=latent_sizes(config),
    )


def latent_sizes(config: ModelConfig) -> LatentSizes | None:
    if config.latent_rank is None:
        return None
    key_dim = config.latent_key_dim or config.dim // config.heads
    return LatentSizes(
        rank=config.latent_rank,
        query_rank=config.latent_query_rank,
        rotary_dim=config.latent_rotary_dim or key_dim // 2,
        key_dim=key_dim,
        value_dim=config.latent_value_dim or key_dim,
    )


def state_config(config: ModelConfig) -> StateConfig | None:
    if set(config.mixers) <= {"attention"}:
        return None
    head_dim = config.head_dim or config.dim // config.heads
    return StateConfig(
        heads=config.state_heads or config.heads,
        key_heads=config.state_key_heads or config.kv_heads,
        key_dim=config.state_key_dim or head_dim,
        value_dim=config.state_value_dim or head_dim,
        conv_width=config.conv_width,
    )


def from_folder(config: ModelConfig, length: int) -> LlamaConfig | GPTConfig:
    if config.pretrained is not None and not config.pretrained.exists():
        raise ValueError(
            f"--model.pretrained {config.pretrained}: there is no such folder; give a Hugging Face folder, as "
            "--model.pretrained FOLDER"
        )
    sizes = pretrained_config(config.pretrained or "")
    check_sizes(config, sizes)
    if isinstance(sizes, GPTConfig):
        check_gpt(config)
        if length > sizes.max_positions:
            raise ValueError(
                f"--data.sequence-length {length}: {config.pretrained} has {sizes.max_positions} learned positions; "
                "give at most as many"
            )
        return sizes
    return replace(
        sizes,
        rope_theta=sizes.rope_theta if config.rope_theta is None else config.rope_theta,
        rope_scaling=sizes.rope_scaling if config.rope_scaling is None else rope_scaling(config),
        max_positions=max(sizes.max_positions, length),
    )


def check_sizes(config: ModelConfig, sizes: LlamaConfig | GPTConfig) -> None:
    """Raises ValueError, with the flag and both values, for sizes that differ from the pretrained folder's."""
    defaults = ModelConfig()
    family = "gpt" if isinstance(sizes, GPTConfig) else "llama"
    latent = sizes.latent if isinstance(sizes, LlamaConfig) else None
    folder_values = {"family": family} | {f"latent_{name}": getattr(latent, name, None) for name in LATENT_SIZES}
    for name in (*SIZES, *folder_values, "vocab_size"):
        value, default = getattr(config, name), getattr(defaults, name)
        folder_value = folder_values.get(name, getattr(sizes, name, default))
        # A field that has its default counts as not set.
        if value not in (default, folder_value):
            raise ValueError(
                f"--model.{flag(name)} {value}: the model in {config.pretrained} has {folder_value}; leave it out, or "
                "train without --model.pretrained"
            )


def check_gpt(config: ModelConfig) -> None:
    defaults = ModelConfig()  # a field that has its default counts as not set
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in GPT_FIELDS and value != getattr(defaults, field.name):
            raise ValueError(
                f"--model.{flag(field.name)} {value}: a GPT has none; leave it out, or use --model.family llama"
            )


def rope_scaling(config: ModelConfig) -> RopeScaling | None:
    match config.rope_scaling:  # with LLaMA 3.1's and YaRN's usual constants
        case "linear":
            return LinearScaling(factor=config.rope_factor)
        case "llama3":
            return Llama3Scaling(
                factor=config.rope_factor,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=config.rope_original_length,
            )
        case "yarn":
            return YarnScaling(factor=config.rope_factor, original_max_position_embeddings=config.rope_original_length)
        case _:
            return None
