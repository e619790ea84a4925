"""The GPTs of the WallFacer paper (arXiv 2407.00611, section 5), with its method."""

from __future__ import annotations

from armillary.models import Checkpointing
from armillary.train.config.sections import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)


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
