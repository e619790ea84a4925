"""A minimal FSDP2 trainer for sequences that are sharded over ranks."""

from importlib import import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from armillary.train.build import prepare, process_group
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

_SLOW_MODULES = {
    "Run": "run",
    "Summary": "reporting.summary",
    "prepare": "build",
    "process_group": "build",
    "train": "trainer",
    "train_loop": "trainer",
}
"""Modules of the names that need FSDP2 and DTensor. A command with wrong arguments ends without them."""


def __getattr__(name: str) -> object:
    """Imports slow names at their first use."""
    if name in _SLOW_MODULES:
        return getattr(import_module(f"armillary.train.{_SLOW_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
