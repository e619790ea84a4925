"""Models and clusters by the names that people type: the planner's only tables."""

from __future__ import annotations

from collections.abc import Callable

from armillary.core import Cluster
from armillary.models import GPTConfig, LlamaConfig

Model = LlamaConfig | GPTConfig

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

CLUSTERS: dict[str, Callable[[], Cluster]] = {
    "8xh100": Cluster.h100,
    "16xh100": lambda: Cluster.h100(nodes=2),
    "8xa100-40": lambda: Cluster.a100(gigabytes=40),
    "8xa100-80": Cluster.a100,
    "8xh200": Cluster.h200,
}


def model_of(name: str, length: int) -> Model:
    """The model of a preset.

    Raises:
        ValueError: no such preset.
    """
    if name not in MODELS:
        raise ValueError(f"--model {name}: known are {', '.join(MODELS)}")
    return MODELS[name](length)


def cluster_of(name: str) -> Cluster:
    """The cluster of a preset.

    Raises:
        ValueError: no such preset.
    """
    if name not in CLUSTERS:
        raise ValueError(f"--cluster {name}: known are {', '.join(CLUSTERS)}")
    return CLUSTERS[name]()
