"""Settings of a run: its sections, their flags, and where they are read and checked."""

from typing import TYPE_CHECKING

from armillary.core.parts import imported_at_first_use
from armillary.train.config.check import GPT_FIELDS, SIZES, check_config, model_config
from armillary.train.config.overlay import by_flag, check_limits, flag, flat, overlay_settings
from armillary.train.config.sections import (
    Config,
    Count,
    CountOrNone,
    CudaConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SaveConfig,
    Several,
    TrainConfig,
    ValidationConfig,
)

if TYPE_CHECKING:
    from armillary.train.command import ConfiguredRun, read_run, recipe_config

__all__ = [
    "GPT_FIELDS",
    "SIZES",
    "Config",
    "ConfiguredRun",
    "Count",
    "CountOrNone",
    "CudaConfig",
    "DataConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "SaveConfig",
    "Several",
    "TrainConfig",
    "ValidationConfig",
    "by_flag",
    "check_config",
    "check_limits",
    "flag",
    "flat",
    "model_config",
    "overlay_settings",
    "read_run",
    "recipe_config",
]

_SLOW_MODULES = {"armillary.train.command": ("ConfiguredRun", "read_run", "recipe_config")}
"""Modules that need tyro, which only commands do."""

__getattr__ = imported_at_first_use(__name__, _SLOW_MODULES)
