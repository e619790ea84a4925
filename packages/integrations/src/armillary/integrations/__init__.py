"""Context parallelism for unmodified models of transformers and diffusers, in accelerate, Trainer and TRL."""

from importlib.metadata import version

from armillary.integrations.accelerate import share_rows
from armillary.integrations.trainer import ContextParallelTrainer
from armillary.integrations.transformers.models import selects_keys
from armillary.integrations.transformers.prepare import register_transformers
from armillary.integrations.transformers.recurrent_layers import shards_states
from armillary.integrations.trl import (
    ContextParallelDPOTrainer,
    ContextParallelGRPOTrainer,
    ContextParallelRewardTrainer,
)

__all__ = [
    "ContextParallelDPOTrainer",
    "ContextParallelGRPOTrainer",
    "ContextParallelRewardTrainer",
    "ContextParallelTrainer",
    "__version__",
    "register_transformers",
    "selects_keys",
    "shards_states",
    "share_rows",
]

__version__ = version("armillary-integrations")
