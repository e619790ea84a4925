"""All ranks are told the same, and read the same data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from armillary.train.config import Config
from armillary.train.config.overlay import flag, flat


def check_consistent(what: str, mine: Mapping[str, Any]) -> None:
    """Refuses ranks that differ in one of these values. Collective.

    Raises:
        ValueError: `what` differs, where, and on which rank; on every rank.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, dict(mine))
    for rank, other in enumerate(found):
        for name, value in found[0].items():
            if other[name] != value:
                both = f"{other[name]} on rank {rank} and {value} on rank 0"
                raise ValueError(f"{what} must be the same on all ranks: {name} is {both}")


def settings(config: Config) -> dict[str, Any]:
    """All fields by their flags. Of paths only that they are given: on another host the same may lie elsewhere."""
    return {f"--{flag(name)}": "a path" if is_path(value) else value for name, value in flat(config)}


def is_path(value: Any) -> bool:
    return isinstance(value, Path) or (isinstance(value, tuple) and any(isinstance(part, Path) for part in value))
