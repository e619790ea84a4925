"""Settings of a run: its sections, their flags, and where they are read and checked."""

from typing import TYPE_CHECKING

from armillary.core.parts import imported_at_first_use
from armillary.train.config.check import check_config
from armillary.train.config.limits import Count, CountOrNone, check_limits
from armillary.train.config.model_sizes import GPT_FIELDS, SIZES, model_config
from armillary.train.config.overlay import by_flag, flag, flat, overlay_settings
from armillary.train.config.sections import (
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
    from armillary.train.command import Source, check_model_flags, find_recipe, read_source

__all__ = [
    "GPT_FIELDS",
    "SIZES",
    "Config",
    "Count",
    "CountOrNone",
    "CudaConfig",
    "DataConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "SaveConfig",
    "Source",
    "TrainConfig",
    "ValidationConfig",
    "by_flag",
    "check_config",
    "check_limits",
    "check_model_flags",
    "find_recipe",
    "flag",
    "flat",
    "model_config",
    "overlay_settings",
    "read_source",
]

_SLOW_MODULES = {"armillary.train.command": ("Source", "check_model_flags", "find_recipe", "read_source")}
"""Modules that need tyro, which only commands do."""

__getattr__ = imported_at_first_use(__name__, _SLOW_MODULES)
