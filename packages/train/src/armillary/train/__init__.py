"""A minimal FSDP2 trainer for sequences that are sharded over ranks."""

from armillary.train.build import prepare, process_group
from armillary.train.config import (
    Config,
    CudaConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SaveConfig,
    TrainConfig,
    ValidationConfig,
)
from armillary.train.reporting.summary import Summary
from armillary.train.run import Run
from armillary.train.trainer import train, train_loop

__all__ = [
    "Config",
    "CudaConfig",
    "DataConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Run",
    "SaveConfig",
    "Summary",
    "TrainConfig",
    "ValidationConfig",
    "prepare",
    "process_group",
    "train",
    "train_loop",
]
