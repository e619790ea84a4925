"""Shapes on a rank: of a step's tensors, and of the largest parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from armillary.attention import Method
from armillary.attention.planning.upipe import head_stages
from armillary.core import compat
from armillary.models import GPT, GPTConfig, Llama, LlamaConfig
from armillary.train.config import Config

LARGEST = 6
"""Number of parameters to show."""


@dataclass(frozen=True)
class Parameter:
    """A parameter, or one of equal shape in each of `count` blocks, with * for the block's number in its name."""

    name: str
    count: int
    shape: tuple[int, ...]
    local: tuple[int, ...]


def shapes_of(
    config: Config, axes: Mapping[str, int], model: LlamaConfig | GPTConfig, attention: Method
) -> dict[str, tuple[int, ...]]:
    """Tensors of a micro-batch, and the queries and keys of one attention kernel call."""
    rows, tp, ranks = config.rows_per_batch, axes["tp"], axes["ulysses"]
    tokens = attention.layout(config.data.sequence_length).sizes[attention.shard]
    shapes = {
        "tokens": (rows, tokens),
        "hidden": (rows, tokens, model.dim),
        "queries": (rows, tokens, model.heads // tp, model.head_dim),
        "keys, values": (rows, tokens, model.kv_heads // tp, model.head_dim),
    }
    if tp == 1 and ranks > 1:
        stage = head_stages(model.heads, model.kv_heads, ranks, getattr(attention, "heads_per_stage", None))
        shapes["queries in attention"] = (rows, tokens * ranks, stage.queries, model.head_dim)
        shapes["keys in attention"] = (rows, tokens * ranks, stage.keys, model.head_dim)
    return shapes


def largest_of(model: Llama | GPT) -> list[Parameter]:
    """Returns the largest parameters; the same one of all blocks is one entry."""
    counts = Counter(
        (re.sub(r"\.\d+\.", ".*.", name), tuple(parameter.shape), tuple(compat.local_part(parameter).shape))
        for name, parameter in model.named_parameters()
    )
    entries = [Parameter(name, count, shape, local) for (name, shape, local), count in counts.items()]
    return sorted(entries, key=lambda p: -p.count * prod(p.shape))[:LARGEST]
