"""What the tuner is asked: everything that its measurements depend on, by the trainer's flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from armillary.models import GPTConfig, LlamaConfig
from armillary.train.config import Config
from armillary.train.config.overlay import flag, shown
from armillary.train.model import SIZES, model_config

Question = dict[str, Any]
"""Values by "section.key", and "ranks"."""
FIXED = ("replicate", "tp")
"""Axes that the tuner leaves as they are asked for."""


def question_of(config: Config, ranks: int, precision: str) -> Question:
    """What a configuration asks of so many ranks.

    Raises:
        ValueError: sizes that make no model.
    """
    return {
        "ranks": ranks,
        **{f"parallel.{name}": getattr(config.parallel, name) for name in FIXED},
        **sizes(model_config(config.model, 1, config.data.sequence_length)),
        "data.sequence_length": config.data.sequence_length,
        "data.global_batch_size": config.data.global_batch_size,
        "data.layout": config.data.layout,
        "optimizer.cpu_offload": config.optimizer.cpu_offload,
        "train.accumulation": config.train.accumulation,
        "train.precision": precision,
        **{f"checkpointing.{name}": value for name, value in asdict(config.checkpointing).items()},
    }


def sizes(model: LlamaConfig | GPTConfig) -> Question:
    """A model's sizes, whether flags or a pretrained folder said them."""
    found = {f"model.{name}": getattr(model, name) for name in SIZES if hasattr(model, name)}
    return {"model.family": "gpt" if isinstance(model, GPTConfig) else "llama", **found}


def dtype_name(dtype: torch.dtype) -> str:
    """As `--train.precision` has it."""
    return str(dtype).removeprefix("torch.")


def difference(known: Mapping[str, Any], asked: Mapping[str, Any], leaving: str = "") -> str | None:
    """In words, the first thing in which two questions differ.

    Args:
        leaving: keys that start so may differ.
    """
    names = [name for name in {**known, **asked} if not (leaving and name.startswith(leaving))]
    name = next((name for name in names if known.get(name) != asked.get(name)), None)
    if name is None:
        return None
    what = "ranks" if name == "ranks" else f"--{flag(name)}"
    return f"{what} {shown(known.get(name))}, and here it is {shown(asked.get(name))}"
