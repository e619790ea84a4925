"""What a run is made of: plain dataclasses, every field settable as `--section.key` on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from armillary.models import Checkpointing


@dataclass(frozen=True)
class ModelConfig:
    """A LLaMA; the default is about a million parameters, to be trained on a laptop."""

    dim: int = 128
    """Model dim (E)."""
    layers: int = 4
    heads: int = 8
    """Query heads (H)."""
    kv_heads: int = 4
    """Key/value heads (K); must divide heads."""
    hidden_dim: int = 352
    """Inner dim of the MLP."""
    rope_theta: float = 10_000.0
    vocab_size: int | None = None
    """Tokens that the model knows (V); by default those of the data."""


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks on each mesh axis. Their product must be the number of ranks."""

    replicate: int = 1
    """Data parallel with whole copies of the parameters (HSDP)."""
    shard: int = 1
    """Data parallel with sharded parameters."""
    ring: int | None = None
    """Sequence axis; by default what the other axes leave."""
    ulysses: int | None = None
    """Head axis; by default as large as ring at most: of 4 ranks, ring 2 x ulysses 2; of 8, ring 4 x ulysses 2."""
    tp: int = 1
    """Tensor parallel: heads, MLP and vocabulary are cut over these ranks; divides heads and kv_heads."""
    attention: str = "usp"
    """local, ring, token_ring, wallfacer, all_gather, ulysses, usp, upipe, or a pair such as upipe+ring."""
    heads_per_stage: int | None = None
    """Query heads that upipe works on at a time, over all ulysses ranks; by default one for each rank."""
    compiler: str | None = None
    """Backend of torch.compile for each block, such as inductor; by default blocks are not compiled."""


@dataclass(frozen=True)
class DataConfig:
    """Rows of tokens."""

    path: tuple[Path, ...] = ()
    """Token stores (of armillary-data prepare, Megatron or Hugging Face datasets), text files, or folders of them, read
    as bytes; by default the sources and topics of this Python installation."""
    weights: tuple[float, ...] = ()
    """Share of rows from each path; by default all paths come to their ends together."""
    sequence_length: int = 1024
    """Tokens of a row (N), over all ranks of ring and ulysses."""
    rows: int = 4
    """Rows of a step, over all ranks; a multiple of replicate x shard."""
    packing: Literal["greedy", "best_fit", "one_per_row"] = "greedy"
    """How documents make rows: joined and cut; cut only where a row cannot hold them; or one to a row, cut off."""
    document_mask: bool = False
    """Tokens see their own document only."""
    reset_positions: bool = False
    """Count positions from the start of each document, not of the row."""
    layout: Literal["zigzag", "contiguous", "striped", "balanced"] = "zigzag"
    """Which positions each sequence rank holds; balanced is chosen for each batch by its documents."""
    validation_fraction: float = 0.05
    """Share of documents that are kept for validation."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = 3e-3
    """Peak learning rate."""
    min_lr: float = 1e-4
    """Learning rate of the last step."""
    warmup_steps: int = 10
    weight_decay: float = 0.1
    """Of matrices; norms have none."""
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    on_host: bool = False
    """Keep master weights, their gradients and AdamW's state in the host's memory, and step there."""


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 80
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is a GPU for this rank, else cpu."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of forward and backward; auto: bfloat16 on cuda, float32 on cpu. Master weights and reductions are float32."""
    log_every: int = 10
    """Steps between log lines."""
    validate_every: int = 40
    """Steps between validations; one is always made after the last step."""
    validation_batches: int = 4
    timeout_minutes: float = 10.0
    """How long any collective may wait for a missing rank."""
    output: Path = Path("outputs")
    """Folder for config.json, the resolved configuration, and for checkpoints."""


@dataclass(frozen=True)
class Config:
    """Trains a LLaMA on sequences sharded over ranks. Start it with torchrun, or alone on one process."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


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
        "train.log-every": (config.train.log_every, 1),
        "train.validate-every": (config.train.validate_every, 1),
        "train.validation-batches": (config.train.validation_batches, 1),
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
    replicas = config.parallel.replicate * config.parallel.shard
    if config.data.rows % replicas:
        raise ValueError(
            f"--data.rows {config.data.rows} cannot be shared by replicate {config.parallel.replicate} x shard "
            f"{config.parallel.shard}; make it a multiple of {replicas}"
        )
