"""Settings of a run: its sections, their flags, and where they are read and checked."""

from armillary.train.command import Source, check_model_flags, find_recipe, read_source
from armillary.train.config.check import check_config
from armillary.train.config.limits import Count, CountOrNone, check_limits
from armillary.train.config.model_sizes import GPT_FIELDS, SIZES, model_config
from armillary.train.config.overlay import by_flag, flag, flag_text, flat, overlay_settings
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

__all__ = [
    "Config",
    "Count",
    "CountOrNone",
    "CudaConfig",
    "DataConfig",
    "GPT_FIELDS",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "SIZES",
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
    "flag_text",
    "flat",
    "model_config",
    "overlay_settings",
    "read_source",
]
