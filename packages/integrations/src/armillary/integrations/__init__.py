"""Context parallelism for unmodified models of transformers and diffusers, in accelerate, Trainer and TRL."""

from armillary.integrations.diffusers.parallelize import parallelize_diffusers
from armillary.integrations.rows import share_rows
from armillary.integrations.trainer import ContextParallelTrainer
from armillary.integrations.transformers.attention import attend_by, register_transformers
from armillary.integrations.transformers.models import padding_idx_of

__all__ = [
    "ContextParallelTrainer",
    "attend_by",
    "padding_idx_of",
    "parallelize_diffusers",
    "register_transformers",
    "share_rows",
]
