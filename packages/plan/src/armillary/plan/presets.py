"""Models, clusters and quantities as people type them: the planner's only table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import tyro

from armillary.core.quantity import quantity
from armillary.models import GPTConfig, LlamaConfig
from armillary.plan.cluster.cluster import Cluster
from armillary.train.config.overlay import flag
from armillary.train.dry_run import MOST_RANKS

Model = LlamaConfig | GPTConfig
Quantity = Annotated[int | str, tyro.conf.arg(metavar="INT")]
"""A number of tokens or bytes, as `amount` reads it."""

MODELS: dict[str, Callable[[int], Model]] = {
    "debug": lambda _: LlamaConfig.debug(),
    "llama3-8b": lambda _: LlamaConfig.llama3_8b(),
    "llama3-70b": lambda _: LlamaConfig.llama3_70b(),
    "llama2-7b": lambda _: LlamaConfig.llama2_7b(),
    "qwen3-32b": lambda _: LlamaConfig.qwen3_32b(),
    "gpt-3b": GPTConfig.wallfacer_3b,
    "gpt-7b": GPTConfig.wallfacer_7b,
}
"""From the length of a sequence, which a model with learned positions must have as many of."""


def model_of(name: str, length: int) -> Model:
    """The model of a preset.

    Raises:
        ValueError: no such preset.
    """
    if name not in MODELS:
        raise ValueError(f"--model {name}: known are {', '.join(MODELS)}")
    return MODELS[name](length)


def cluster_of(name: str) -> Cluster:
    """The cluster of a name such as "16xh100", or of a TOML file as `Cluster.load` reads it.

    Raises:
        ValueError: no such machine, accelerators that do not fill nodes, or a file that describes none.
    """
    try:
        found = Cluster.load(name) if name.endswith(".toml") else Cluster.named(name)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--cluster {name}: {why}") from error
    if found.ranks > MOST_RANKS:
        raise ValueError(f"--cluster {name}: {found.ranks:,} ranks; at most {MOST_RANKS:,} are supported")
    return found


def amount(plan: Any, name: str) -> int:
    """The quantity that a field has as a number, or as text such as "128Ki".

    Raises:
        ValueError: it is none; names the flag.
    """
    try:
        return quantity(getattr(plan, name))
    except ValueError as error:
        raise ValueError(f"--{flag(name)}: {error}") from error
