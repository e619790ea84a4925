"""Shapes on a rank: of a step's tensors, and of the largest parameters."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.attention import Method
from armillary.models import GPT, Llama
from armillary.plan.memory import Job
from armillary.plan.memory.estimate.step import Step

LARGEST = 6
"""Parameters that are shown."""


@dataclass(frozen=True)
class Parameter:
    """A parameter, or several of equal shape in as many blocks, whose number stands as * in the name."""

    name: str
    count: int
    shape: tuple[int, ...]
    local: tuple[int, ...]


def shapes_of(job: Job, attention: Method) -> dict[str, tuple[int, ...]]:
    """Tensors of a part of a step, and queries and keys as the attention kernel has them at a time."""
    model, tp = job.model, job.axes["tp"]
    tokens = len(attention.layout(job.length).positions(attention.shard))
    shapes = {
        "tokens": (job.rows, tokens),
        "hidden": (job.rows, tokens, model.dim),
        "queries": (job.rows, tokens, model.heads // tp, model.head_dim),
        "keys, values": (job.rows, tokens, model.kv_heads // tp, model.head_dim),
    }
    if tp == 1 and job.axes["ulysses"] > 1:
        stage, gathered = Step.of(job).stages, tokens * job.axes["ulysses"]
        shapes["queries in attention"] = (job.rows, gathered, stage.queries, model.head_dim)
        shapes["keys in attention"] = (job.rows, gathered, stage.keys, model.head_dim)
    return shapes


def local_part(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def largest_of(model: Llama | GPT) -> list[Parameter]:
    """Those with most numbers, like ones of all blocks as one."""
    counts = Counter(
        (re.sub(r"\.\d+\.", ".*.", name), tuple(parameter.shape), tuple(local_part(parameter).shape))
        for name, parameter in model.named_parameters()
    )
    found = [Parameter(name, count, shape, local) for (name, shape, local), count in counts.items()]
    return sorted(found, key=lambda p: -p.count * prod(p.shape))[:LARGEST]
