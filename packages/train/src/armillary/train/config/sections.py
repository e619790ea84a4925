"""The configuration of a run: plain dataclasses, every field settable as `--section.key` on the command line.

A field's docstring is its `--help` text. It is one line, because tyro keeps the line breaks of longer ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from armillary.data.console import LARGEST
from armillary.models import Checkpointing, Mixer

Item = TypeVar("Item")

# Limits of fields, which `check_limits` checks.
Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrNone = Count | None
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Several = Annotated[tuple[Item, ...], Field(strict=False)]
"""A tuple, for which Python code may also give a list."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a LLaMA, a hybrid or a GPT, or a pretrained folder; by default 0.8 million parameters, for a laptop."""

    family: Literal["llama", "gpt"] = "llama"
    """gpt is GPT-2: LayerNorm, learned positions, tied embeddings; its sizes are dim, layers, heads and vocab-size."""
    dim: Count = 128
    """Model dim (E)."""
    layers: Count = 4
    """Transformer blocks."""
    heads: Count = 8
    """Query heads (H)."""
    kv_heads: Count = 4
    """Key/value heads (K); must divide heads."""
    hidden_dim: Count = 352
    """Inner dim of the MLP."""
    head_dim: CountOrNone = None
    """Head dim (D); by default dim / heads."""
    qk_norm: bool = False
    """RMSNorm of queries and keys before RoPE (Qwen3)."""
    tied_embeddings: bool = False
    """The LM head shares the embedding table's weights."""
    mixers: Several[Mixer] = ("attention",)
    """Mixer of each block, repeated to layers: attention, delta_rule (Gated DeltaNet) or mamba2."""
    state_heads: CountOrNone = None
    """Value heads of mixers with a state; by default heads."""
    state_key_heads: CountOrNone = None
    """Key heads of the delta rule, groups of Mamba-2; by default kv_heads."""
    state_key_dim: CountOrNone = None
    """Dim of a key head, the rows of a state; by default attention's head dim."""
    state_value_dim: CountOrNone = None
    """Dim of a value head, the columns of a state; by default attention's head dim."""
    conv_width: Count = 4
    """Tokens that the short convolution before a state sees."""
    latent_rank: CountOrNone = None
    """Multi-head latent attention (DeepSeek): dim of the latent of keys and values; kv_heads is then heads."""
    latent_query_rank: CountOrNone = None
    """Dim of the latent of queries; by default queries have none."""
    latent_rotary_dim: CountOrNone = None
    """Dims of a query that RoPE rotates, and of the rotary key of all heads; by default half of latent-key-dim."""
    latent_key_dim: CountOrNone = None
    """Dims of a query and of a head's key without positions; by default dim / heads."""
    latent_value_dim: CountOrNone = None
    """Dims of a head's value; by default latent-key-dim."""
    rope_theta: Positive | None = None
    """Base of RoPE's frequencies; by default 10,000, or the pretrained folder's."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] | None = None
    """RoPE scaling for longer sequences than the model was trained on; by default none, or as in the folder."""
    rope_factor: Positive = 8.0
    """Factor by which RoPE scaling divides frequencies: linear all of them, llama3 and yarn low ones."""
    rope_original_length: Count = 8192
    """Sequence length that the model was trained on before scaling; for llama3 and yarn."""
    vocab_size: CountOrNone = None
    """Vocabulary size (V); by default the data's."""
    pretrained: Path | None = None
    """Hugging Face folder to start from: weights, sizes, and the tokenizer for text; RoPE may be overridden."""


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks on each mesh axis, whose product is the number of ranks, and the attention method that runs on them."""

    replicate: Count = 1
    """Data-parallel replicas of the parameters (HSDP)."""
    shard: Count = 1
    """Data-parallel ranks that shard the parameters (FSDP), as ranks of ring and ulysses do."""
    ring: CountOrNone = None
    """Context-parallel ranks on the sequence axis; by default all remaining ranks."""
    ulysses: CountOrNone = None
    """Context-parallel ranks on the head axis; by default all remaining, but at most ring if that is unset too."""
    cp: CountOrNone = None
    """Context-parallel degree, split for usp: ulysses as large as key heads and a node allow, and ring."""
    tp: Count = 1
    """Tensor-parallel ranks for heads, MLP and vocabulary; must divide hidden_dim and all counts of heads."""
    attention: str = "usp"
    """local, ring, token_ring, wallfacer, all_gather, ring+ring, ring+token_ring, ulysses, usp, upipe, upipe+ring..."""
    heads_per_stage: CountOrNone = None
    """upipe: query heads of a stage, over all ulysses ranks; by default one for each rank."""
    team: CountOrNone = None
    """wallfacer: ranks of a team (C), whose square divides ring; by default the largest that fits."""
    placement: Literal["collect_intra", "p2p_intra"] = "collect_intra"
    """wallfacer: neighbouring ranks are a team (collect_intra), or a ring (p2p_intra)."""
    nodes: CountOrNone = None
    """ring+ring, ring+token_ring: nodes of the ring; by default the run's, on one node the smallest divisor above 1."""
    kernel: str | None = None
    """Attention kernel: cudnn, flash_attn_2 to 4, cuda_flash, efficient, cpu_flash or dense; by default the fastest."""
    zero_stage: Literal[1, 2, 3] = 3
    """ZeRO stage: 3 gathers a block's parameters for forward and again for backward, 2 once for both, 1 once a step."""
    compiler: str | None = None
    """Backend of torch.compile for each block, such as inductor; by default none."""
    contiguous_states: bool = False
    """Move hidden states to contiguous shards before a hybrid's layers with a state, and back to data.layout."""


@dataclass(frozen=True)
class DataConfig:
    """Sequences of tokens: where they come from, how documents are packed into them, how they are sharded."""

    path: Several[Path] = ()
    """Token stores (armillary-data prepare, Megatron, datasets), or text; by default Python's own sources."""
    weights: Several[float] = ()
    """Share of sequences from each path; by default the number of sequences in an epoch of its store."""
    sequence_length: Count = 1024
    """Tokens of a sequence (N), over all context-parallel ranks."""
    global_batch_size: Count = 4
    """Sequences of a step, over all ranks and micro-batches; a multiple of replicate x shard x accumulation."""
    packing: Literal["greedy", "best_fit", "one_per_row"] = "greedy"
    """greedy concatenates and cuts documents; best_fit cuts only those above a sequence; one_per_row truncates."""
    documents: bool = False
    """Attend within documents only (varlen attention by cu_seqlens); rows of trees always attend along their paths."""
    reset_positions: bool = False
    """Position ids restart at each document."""
    layout: Literal["zigzag", "contiguous", "striped", "balanced"] = "zigzag"
    """Distribution of positions over ring ranks; balanced is computed for each batch from its documents."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Fraction of documents for validation."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: Positive = 3e-3
    """Peak learning rate."""
    min_lr: NotNegative = 1e-4
    """Learning rate of the last step, unless the schedule is constant."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After warm-up: cosine or linear decay to min-lr; lr until the last decay-steps (wsd); or lr to the end."""
    warmup_steps: Annotated[int, Field(ge=0, le=LARGEST)] = 10
    """Steps of linear warm-up; a run with no more --train.steps than that warms up for half of its steps."""
    decay_steps: CountOrNone = None
    """wsd: steps of the linear decay to min-lr at the end; by default a tenth of all steps."""
    weight_decay: NotNegative = 0.1
    """Weight decay of matrices; norms and biases have none."""
    decay_embeddings: bool = True
    """Weight decay of embedding tables too; OLMo 2 has none."""
    beta1: Momentum = 0.9
    """Decay of the first moment."""
    beta2: Momentum = 0.95
    """Decay of the second moment."""
    eps: Positive = 1e-8
    """Added to the square root of the second moment."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient norm to clip to; inf: no clipping."""
    cpu_offload: bool = False
    """Keep master weights, their gradients and AdamW's state in the host's memory, and run AdamW there."""


@dataclass(frozen=True)
class CudaConfig:
    """Settings of CUDA and NCCL; unused on the CPU."""

    expandable_segments: bool = True
    """Let the allocator's segments grow, against fragmentation; PYTORCH_ALLOC_CONF overrides it."""
    bind_device: bool = True
    """Bind NCCL to the rank's GPU, so that NCCL connects eagerly and splits communicators; torch 2.15 always does."""
    high_priority: bool = True
    """Run exchanges of ring and ulysses on streams of high priority, with communicators of their own."""
    max_ctas: CountOrNone = None
    """Maximum number of thread blocks of an NCCL kernel of ring or ulysses; by default NCCL decides."""
    sm_margin: Annotated[int | None, Field(ge=0, le=1024)] = None
    """Multiprocessors that flash_attn_3 leaves to NCCL; by default 16 where ring > 1, unless blocks are compiled."""
    connections: Annotated[int, Field(ge=1, le=32)] = 32
    """Work queues of the GPU; streams that share one wait for each other. CUDA_DEVICE_MAX_CONNECTIONS overrides it."""


@dataclass(frozen=True)
class ValidationConfig:
    """Validation between steps: the loss on held-out sequences."""

    every: Count = 40
    """Steps between validations; one is always made after the last step."""
    batches: Count = 4
    """Global batches of held-out sequences, the same each time."""


@dataclass(frozen=True)
class SaveConfig:
    """Checkpoints in outputs/checkpoint/step-N, which appear only when complete; the last step is always saved."""

    every: Count = 40
    """Steps between checkpoints."""
    keep_last: Count = 2
    """Newest checkpoints to keep."""
    keep_every: CountOrNone = None
    """Keep every n-th step's checkpoint permanently."""
    asynchronous: bool = True
    """Write in the background, from a copy in the host's memory."""
    resume: Literal["auto", "never"] = "auto"
    """auto: resume from the newest intact checkpoint of the output folder; never: refuse a folder that has any."""
    export: bool = False
    """Export the weights as a Hugging Face folder after the last step: outputs/export/step-N."""


@dataclass(frozen=True)
class LogConfig:
    """Logs, traces and pictures; every step is logged to outputs/metrics.jsonl."""

    every: Count = 10
    """Steps between log lines."""
    tensorboard: bool = False
    """Write TensorBoard events to outputs/tb."""
    wandb: str | None = None
    """Weights & Biases project to log to."""
    profile: Several[int] = ()
    """Steps whose torch.profiler traces are written to outputs/profile."""
    trace: Path | None = None
    """File for a Chrome trace of all ranks: compute and communication side by side."""
    trace_steps: Several[int] = ()
    """Steps that --log.trace shows; by default the second after a start."""
    memory_snapshot: Several[int] = ()
    """Steps after which the CUDA allocator's history is written to outputs/profile."""
    plot: bool = True
    """Draw outputs/loss.png at the end, if matplotlib is installed."""


@dataclass(frozen=True)
class CheckConfig:
    """Verification of context parallelism in the running step, by armillary-check."""

    verify_every: CountOrNone = None
    """Steps between verifications, besides the first step of a start; a wrong fact ends the run before the update."""


@dataclass(frozen=True)
class TrainConfig:
    """The run: its steps, device and precision, and when it stops."""

    steps: Count = 80
    """Optimizer steps, over all restarts."""
    accumulation: Count = 1
    """Gradient accumulation: number of micro-batches in a step; must divide data.global_batch_size."""
    seed: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    """Seed of the initial weights, of the order of documents, and of random numbers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if the machine has a GPU for each of its ranks, else cpu."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Dtype of forward and backward; auto: bfloat16 on cuda, else float32. Master weights are float32 or float64."""
    bad_step: Literal["stop", "skip"] = "stop"
    """On a non-finite loss or gradient: stop, or skip the update and continue."""
    bad_steps: Count = 3
    """With skip: number of consecutive bad steps after which the run stops anyway."""
    timeout_minutes: Annotated[float, Field(gt=0, le=10**6)] = 10.0
    """Watchdog: minutes that a step may take before the run ends as hung; 5x for the first step and other phases."""
    output: Path = Path("outputs")
    """Folder for the files of a run, on a file system that all hosts share."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a run: one section for each part."""

    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    cuda: CudaConfig = field(default_factory=CudaConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)
    check: CheckConfig = field(default_factory=CheckConfig)

    @property
    def replicas(self) -> int:
        """Number of data-parallel groups of ranks, each with its own rows."""
        return self.parallel.replicate * self.parallel.shard

    @property
    def rows_per_batch(self) -> int:
        """Rows of a rank's micro-batch (B)."""
        return self.data.global_batch_size // (self.replicas * self.train.accumulation)
