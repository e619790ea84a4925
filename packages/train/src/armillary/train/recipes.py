"""Complete configurations. Each is a function that returns a `Config`, to be changed with `replace`.

Memory is as `armillary-plan run --recipe NAME` predicts it; no recipe for GPUs has run on its machine yet. A recipe
that names no data trains on the sources of this Python installation: give `--data.path`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from armillary.models import Checkpointing
from armillary.train.config.sections import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SaveConfig,
    TrainConfig,
    ValidationConfig,
)

__all__ = [
    "debug",
    "finetune",
    "gpt_wallfacer_3b",
    "gpt_wallfacer_7b",
    "hybrid",
    "llama3_8b_1m",
    "llama3_8b_5m",
    "llama3_8b_128k",
    "llama3_70b_128k",
]

LLAMA3_8B = ModelConfig(
    dim=4096, layers=32, heads=32, kv_heads=8, hidden_dim=14_336, rope_theta=500_000.0, vocab_size=128_256
)
LLAMA3_70B = ModelConfig(
    dim=8192, layers=80, heads=64, kv_heads=8, hidden_dim=28_672, rope_theta=500_000.0, vocab_size=128_256
)


def debug() -> Config:
    """0.8 million parameters on Python's own text: any number of CPU ranks, two minutes, loss 5.6 -> 2.9."""
    return Config()


def hybrid() -> Config:
    """Gated DeltaNet, Mamba-2 and attention in turn, on Python's own text: CPU ranks, two minutes, loss 5.6 -> 2.5."""
    return Config(
        model=ModelConfig(
            dim=64, layers=3, heads=4, kv_heads=4, hidden_dim=128, mixers=("delta_rule", "mamba2", "attention")
        ),
        data=DataConfig(sequence_length=512),
    )


def finetune(folder: Path = Path("pretrained")) -> Config:
    """A Hugging Face folder (LLaMA, Mistral, Qwen or GPT-2: weights, sizes, tokenizer) on your own documents.

    The folder is `pretrained` here unless `--model.pretrained` names another, `--data.path` your text or token stores.
    Any number of ranks: an 8B needs 8 x H100 80 GB at 32,768 tokens. Documents are packed, and see only themselves.
    Weights are written as a Hugging Face folder again at the end.
    """
    return Config(
        model=ModelConfig(pretrained=folder),
        checkpointing=Checkpointing("attention_output"),
        data=DataConfig(
            sequence_length=32_768,
            global_batch_size=8,
            packing="best_fit",
            documents=True,
            reset_positions=True,
            layout="balanced",
        ),
        optimizer=OptimizerConfig(lr=1e-5, min_lr=1e-6, warmup_steps=20, weight_decay=0.0),
        save=SaveConfig(every=100, export=True),
        train=TrainConfig(steps=500, accumulation=2),
    )


# -- GPTs of the WallFacer paper (arXiv 2407.00611, section 5), with its method ---------------------------------------


def gpt_wallfacer_3b() -> Config:
    """The paper's "3B" GPT at 262,144 tokens on 8 x H100 80 GB: WallFacer with teams of 2. 25 of 74 GiB a device."""
    return wallfacer(layers=12, heads=16)


def gpt_wallfacer_7b() -> Config:
    """The paper's "7B" GPT at 262,144 tokens on 8 x H100 80 GB: WallFacer with teams of 2. 41 of 74 GiB a device."""
    return wallfacer(layers=32, heads=32)


def wallfacer(layers: int, heads: int) -> Config:
    """Returns the configuration of both GPTs. Backward recomputes everything in a block except attention."""
    return Config(
        model=ModelConfig(family="gpt", dim=4096, layers=layers, heads=heads, vocab_size=50_257),
        parallel=ParallelConfig(ring=8, ulysses=1, attention="wallfacer"),
        checkpointing=Checkpointing("attention_output"),
        data=DataConfig(sequence_length=262_144, global_batch_size=1),
        optimizer=OptimizerConfig(lr=1e-4, min_lr=1e-5, warmup_steps=100),
        train=TrainConfig(steps=1000, timeout_minutes=60.0),
    )


# -- LLaMA-3 (arXiv 2407.21783) on long sequences ---------------------------------------------------------------------
#
# Sizes and, at 128k, RoPE's scaling are those of LLaMA 3.1. Learning rates are modest, because a run for long sequences
# should continue from published weights (`--model.pretrained FOLDER`).


def llama3_8b_128k() -> Config:
    """LLaMA-3.1-8B at 131,072 tokens on 8 x H100 80 GB: Ulysses, with one key head per rank.

    A step is a million tokens: 8 rows, one after the other. Backward recomputes only the MLP: at most 58 of 74 GiB a
    device (42 by the planner's formulas), nothing on the host.
    """
    return long_run(
        scale_rope(LLAMA3_8B),
        length=131_072,
        rows=8,
        accumulation=8,
        parallel=ParallelConfig(ring=1, ulysses=8, attention="ulysses"),
        checkpointing=Checkpointing(tiled=True),
    )


def llama3_8b_1m() -> Config:
    """LLaMA-3-8B at 1,048,576 tokens on 8 x H100 80 GB: UPipe (arXiv 2602.21196), attention's results kept on the host.

    At this length attention is nearly all of the work, so backward does not recompute it. A rank takes 25 of 74 GiB
    of its device and 65 of its 221 GiB of the host. RoPE is LLaMA 3's: its slowest pair turns once in 2.6 million
    positions.
    """
    return long_run(
        LLAMA3_8B,
        length=1_048_576,
        parallel=ParallelConfig(ring=1, ulysses=8, attention="upipe"),
        checkpointing=Checkpointing("attention_output", offload=True, prefetch=False),
    )


def llama3_8b_5m() -> Config:
    """LLaMA-3-8B at 5,242,880 tokens on 8 x H100 80 GB: UPipe, blocks' inputs and the optimizer on the host.

    A rank takes 41 of 74 GiB of its device and 171 of its 221 GiB of the host, which has no room for attention's
    outputs: backward recomputes them. A step takes about two hours. Theta is 5 million, so that RoPE's slowest pair
    turns once in 25 million positions; it is not tuned.
    """
    return long_run(
        replace(LLAMA3_8B, rope_theta=5_000_000.0),
        length=5_242_880,
        parallel=ParallelConfig(ring=1, ulysses=8, attention="upipe"),
        checkpointing=Checkpointing("layer", offload=True, prefetch=False),
        cpu_offload=True,
        timeout_minutes=600.0,
    )


def llama3_70b_128k() -> Config:
    """LLaMA-3.1-70B at 131,072 tokens on 4 nodes of 8 x H100 80 GB: a sequence for each node, Ulysses within.

    Nodes exchange only parameters and gradients. A rank takes 54 of 74 GiB of its device and 40 of its 221 GiB of
    the host, which keeps attention's outputs.
    """
    return long_run(
        scale_rope(LLAMA3_70B),
        lr=1e-5,
        length=131_072,
        rows=8,
        accumulation=2,
        parallel=ParallelConfig(shard=4, ring=1, ulysses=8, attention="ulysses"),
        checkpointing=Checkpointing("attention_output", offload=True),
    )


def scale_rope(model: ModelConfig) -> ModelConfig:
    """Returns the model with LLaMA 3.1's RoPE, which was trained up to 131,072 tokens."""
    return replace(model, rope_scaling="llama3", rope_factor=8.0, rope_original_length=8192)


def long_run(
    model: ModelConfig,
    *,
    length: int,
    parallel: ParallelConfig,
    checkpointing: Checkpointing,
    rows: int = 1,
    accumulation: int = 1,
    lr: float = 2e-5,
    cpu_offload: bool = False,
    timeout_minutes: float = 60.0,
) -> Config:
    """Returns a run of a thousand steps with a short warm-up.

    Args:
        length: N, tokens of a row.
        rows: rows of a global batch.
    """
    return Config(
        model=model,
        parallel=parallel,
        checkpointing=checkpointing,
        data=DataConfig(sequence_length=length, global_batch_size=rows),
        optimizer=OptimizerConfig(lr=lr, min_lr=lr / 10, warmup_steps=20, cpu_offload=cpu_offload),
        validation=ValidationConfig(every=100, batches=1),
        save=SaveConfig(every=100),
        train=TrainConfig(steps=1000, accumulation=accumulation, timeout_minutes=timeout_minutes),
    )
