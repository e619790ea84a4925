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

MACHINES: dict[str, Callable[[int], Cluster]] = {
    "h100": Cluster.h100,
    "h200": Cluster.h200,
    "a100-40": lambda nodes: Cluster.a100(nodes, gigabytes=40),
    "a100-80": Cluster.a100,
}
"""From a number of nodes, each with 8 accelerators."""


def model_of(name: str, length: int) -> Model:
    """The model of a preset.

    Raises:
        ValueError: no such preset.
    """
    if name not in MODELS:
        raise ValueError(f"--model {name}: known are {', '.join(MODELS)}")
    return MODELS[name](length)


def cluster_of(name: str) -> Cluster:
    """The cluster of a name such as "16xh100".

    Raises:
        ValueError: no such machine, or accelerators that do not fill nodes.
    """
    count, _, machine = name.partition("x")
    if machine not in MACHINES or not count.isdecimal() or int(count) < 1 or int(count) % 8:
        raise ValueError(
            f"--cluster {name}: known are 8xh100, 16xh100 and other multiples of 8 of {', '.join(MACHINES)}"
        )
    return MACHINES[machine](int(count) // 8)
