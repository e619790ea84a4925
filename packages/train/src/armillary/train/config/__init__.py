"""Settings of a run: limits and flags of fields, and how they are read and checked. The sections: `armillary.train`."""

from typing import TYPE_CHECKING

from armillary.core.internal import imported_at_first_use
from armillary.train.config.check import GPT_FIELDS, SIZES, check_config, model_config
from armillary.train.config.commented_toml import toml_value
from armillary.train.config.overlay import by_flag, check_limits, flag, flat, overlay_settings
from armillary.train.config.sections import Count, CountOrNone, Several

if TYPE_CHECKING:
    from armillary.train.cli import ConfiguredRun, read_run, recipe_config

__all__ = [
    "GPT_FIELDS",
    "SIZES",
    "ConfiguredRun",
    "Count",
    "CountOrNone",
    "Several",
    "by_flag",
    "check_config",
    "check_limits",
    "flag",
    "flat",
    "model_config",
    "overlay_settings",
    "read_run",
    "recipe_config",
    "toml_value",
]

# Modules that need tyro, which only commands do.
_SLOW_MODULES = {"armillary.train.cli": ("ConfiguredRun", "read_run", "recipe_config")}

__getattr__ = imported_at_first_use(__name__, _SLOW_MODULES)
