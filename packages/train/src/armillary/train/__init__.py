"""A minimal FSDP2 trainer for sequences that are sharded over ranks."""

from armillary.train.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from armillary.train.trainer import Run, Summary, prepare, process_group, train

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Run",
    "Summary",
    "TrainConfig",
    "prepare",
    "process_group",
    "train",
]
