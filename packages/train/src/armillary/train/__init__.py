"""A minimal FSDP2 trainer for sequences that are sharded over ranks."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from armillary.core.internal import imported_at_first_use
from armillary.train.config.sections import (
    CheckConfig,
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
    from armillary.train.loop import train, train_loop
    from armillary.train.metrics import Summary
    from armillary.train.step import Run

__all__ = [
    "CheckConfig",
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
    "__version__",
    "prepare",
    "process_group",
    "train",
    "train_loop",
]

__version__ = version("armillary-train")

# Modules that need FSDP2 and DTensor. A command with wrong arguments ends without them.
_SLOW_MODULES = {
    "armillary.train.step": ("Run",),
    "armillary.train.metrics": ("Summary",),
    "armillary.train.build": ("prepare", "process_group"),
    "armillary.train.loop": ("train", "train_loop"),
}

__getattr__ = imported_at_first_use(__name__, _SLOW_MODULES)
