"""What a run is made of: plain dataclasses, every field settable as `--section.key` on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from armillary.core.quantity import LARGEST
from armillary.models import Checkpointing
from armillary.train.config.limits import Count, CountOrNone, Momentum, NotNegative, Positive


@dataclass(frozen=True)
class ModelConfig:
    """A LLaMA or a GPT; the default is about a million parameters, to be trained on a laptop."""

    family: Literal["llama", "gpt"] = "llama"
    """gpt is GPT-2: LayerNorm, as many learned positions as a row has, a tied head; of dim, layers and heads alone."""
    dim: Count = 128
    """Model dim (E)."""
    layers: Count = 4
    heads: Count = 8
    """Query heads (H)."""
    kv_heads: Count = 4
    """Key/value heads (K); must divide heads."""
    hidden_dim: Count = 352
    """Inner dim of the MLP."""
    head_dim: CountOrNone = None
    """D; by default dim / heads."""
    qk_norm: bool = False
    """Queries and keys go through an RMSNorm before their rotation (Qwen3)."""
    tied_embeddings: bool = False
    """The head is the embedding table."""
    rope_theta: Positive | None = None
    """Base of RoPE's frequencies; by default 10,000, or that of the pretrained folder."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] | None = None
    """How they are changed for longer sequences than the model was trained on; by default not, or as in the folder."""
    rope_factor: Positive = 8.0
    """How many times more slowly slow pairs turn under that scaling."""
    rope_original_length: Count = 8192
    """Tokens of the sequences that the model was trained on before that scaling; of llama3 and yarn."""
    vocab_size: CountOrNone = None
    """Tokens that the model knows (V); by default those of the data."""
    pretrained: Path | None = None
    """Hugging Face folder to start from: its weights and sizes, and its tokenizer for data that is text. Sizes may be
    left out then, and RoPE may be another."""


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks on each mesh axis. Their product must be the number of ranks."""

    replicate: Count = 1
    """Data parallel with whole copies of the parameters (HSDP)."""
    shard: Count = 1
    """Data parallel with sharded parameters."""
    ring: CountOrNone = None
    """Sequence axis; by default what the other axes leave."""
    ulysses: CountOrNone = None
    """Head axis; by default as large as ring at most: of 4 ranks, ring 2 x ulysses 2; of 8, ring 4 x ulysses 2."""
    tp: Count = 1
    """Tensor parallel: heads, MLP and vocabulary are cut over these ranks; divides heads and kv_heads."""
    attention: str = "usp"
    """local, ring, token_ring, wallfacer, all_gather, ulysses, usp, upipe, or a pair such as upipe+ring."""
    heads_per_stage: CountOrNone = None
    """Query heads that upipe works on at a time, over all ulysses ranks; by default one for each rank."""
    team: CountOrNone = None
    """Ranks of a team of wallfacer (C); by default the largest that fits. Its square must divide ring."""
    placement: Literal["collect_intra", "p2p_intra"] = "collect_intra"
    """Of wallfacer: whether the ranks of a team are neighbours, or those of a ring."""
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
    sequence_length: Count = 1024
    """Tokens of a row (N), over all ranks of ring and ulysses."""
    global_batch_size: Count = 4
    """Sequences of a step, over all ranks and --train.accumulation; a multiple of replicate x shard."""
    packing: Literal["greedy", "best_fit", "one_per_row"] = "greedy"
    """How documents make rows: joined and cut; cut only where a row cannot hold them; or one to a row, cut off."""
    document_mask: bool = False
    """Tokens see their own document only."""
    reset_positions: bool = False
    """Count positions from the start of each document, not of the row."""
    layout: Literal["zigzag", "contiguous", "striped", "balanced"] = "zigzag"
    """Which positions each sequence rank holds; balanced is chosen for each batch by its documents."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of documents that are kept for validation."""
    task: Literal["recall", "needle", "copy"] | None = None
    """Train on a long-context task with a known answer instead of text. No question of recall can be answered from the
    tokens of the rank that has it."""
    pairs: Count = 8
    """Keys with a value that a row of recall holds, and asks for at its end; at most symbols."""
    symbols: Count = 16
    """Different keys, values and fillers of the tasks, or tokens to copy; at most those that the model has room for."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, and its learning rate over the run."""

    lr: Positive = 3e-3
    """Peak learning rate."""
    min_lr: NotNegative = 1e-4
    """Learning rate of the last step."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After the warm-up: half a cosine or a line down to min-lr; or the peak until the last decay-steps (wsd), or to
    the end (constant)."""
    warmup_steps: Annotated[int, Field(ge=0, le=LARGEST)] = 10
    """Steps of a line up to the peak. Of a run that has no more steps than that, it takes half. The schedule is one of
    all --train.steps, so that a run that goes on to more of them goes on at another rate than it had come down to."""
    decay_steps: CountOrNone = None
    """Steps at the end in which wsd comes down to min-lr, on a line; by default a tenth of all steps."""
    weight_decay: NotNegative = 0.1
    """Of matrices; norms and biases have none."""
    decay_embeddings: bool = True
    """Of embedding tables too, as GPT-2's and LLaMA's heirs mostly have it; without, as OLMo 2 has it, rows of rare
    tokens don't shrink."""
    beta1: Momentum = 0.9
    beta2: Momentum = 0.95
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm; inf scales nothing."""
    cpu_offload: bool = False
    """Keep master weights, their gradients and AdamW's state in the host's memory, and step there."""


@dataclass(frozen=True)
class ValidationConfig:
    """What is looked at between steps, with the model as it is then."""

    every: Count = 40
    """Steps between validations; one is always made after the last step."""
    batches: Count = 4
    """Batches of held-out rows, the same each time."""
    tasks: tuple[Literal["recall", "needle", "copy"], ...] = ()
    """Long-context tasks with a known answer, as long as a row and never trained on; the share of right answers is
    shown."""


@dataclass(frozen=True)
class SaveConfig:
    """Checkpoints: outputs/checkpoint/step-N, whole or not there at all. The last step is always saved."""

    every: Count = 40
    """Steps between checkpoints."""
    keep_last: Count = 2
    """Newest checkpoints that are kept."""
    keep_every: CountOrNone = None
    """Checkpoints of steps that this number divides are kept for good."""
    asynchronous: bool = True
    """Write while training goes on, from a copy in the host's memory."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest whole checkpoint in the output folder; never: refuse a folder that has any."""
    export: bool = False
    """Write the weights as a Hugging Face folder too, after the last step: outputs/export/step-N."""


@dataclass(frozen=True)
class LogConfig:
    """What a run tells of itself. Every step stands in outputs/metrics.jsonl."""

    every: Count = 10
    """Steps between log lines."""
    tensorboard: bool = False
    """Write events for TensorBoard to outputs/tb."""
    wandb: str | None = None
    """Project at Weights & Biases to log to."""
    profile: tuple[int, ...] = ()
    """Steps of which torch's profiler writes a trace to outputs/profile."""
    trace: Path | None = None
    """File for a Chrome trace of all ranks: what each computes, and what it sends and receives meanwhile."""
    trace_steps: tuple[int, ...] = ()
    """Steps that it shows; by default the second that is made after a start."""
    memory_snapshot: tuple[int, ...] = ()
    """Steps after which the allocator's history is written to outputs/profile; cuda only."""
    plot: bool = True
    """Draw outputs/loss.png at the end, where matplotlib is installed."""


@dataclass(frozen=True)
class TrainConfig:
    steps: Count = 80
    accumulation: Count = 1
    """Gradient accumulation: micro-batches of a step, one after the other; they divide data.global_batch_size."""
    seed: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is a GPU for this rank, else cpu."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Of forward and backward; auto: bfloat16 on cuda, float32 on cpu. Master weights and reductions are float32, with
    float64 all is float64."""
    bad_step: Literal["stop", "skip"] = "stop"
    """What to do about a loss or gradient that is not finite: stop, or leave the weights as they are and go on."""
    bad_steps: Count = 3
    """Bad steps in a row after which the run stops all the same: the last of them isn't skipped."""
    timeout_minutes: Annotated[float, Field(gt=0, le=10**6)] = 10.0
    """How long a step may take before every rank says which one is missing, and the run ends. A collective may wait
    half as long again; the first step, validation and saving may take five times as long."""
    output: Path = Path("outputs")
    """Folder for all that a run writes; every rank must see the same one."""


@dataclass(frozen=True)
class Config:
    """Trains a LLaMA or a GPT on sequences sharded over ranks. Start it with torchrun, or alone on one process."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def replicas(self) -> int:
        """Parts of a step's rows that are read by other ranks each."""
        return self.parallel.replicate * self.parallel.shard

    @property
    def rows_per_batch(self) -> int:
        """Rows that a rank works on at a time, B."""
        return self.data.global_batch_size // (self.replicas * self.train.accumulation)
