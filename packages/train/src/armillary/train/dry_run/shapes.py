"""Shapes on a rank: of a micro-batch's tensors, and of the largest parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from armillary.attention import Method
from armillary.attention.plans import head_stages
from armillary.core.parts import compat
from armillary.models import GPT, GPTConfig, Llama, LlamaConfig
from armillary.train.config.sections import Config

SHOWN_PARAMETERS = 6
"""Number of parameters in the table of the largest."""


@dataclass(frozen=True)
class Parameter:
    """A parameter, or `count` parameters of equal name and shape in as many blocks.

    Args:
        name: name in the model, with * instead of the block's number.
        shape: global shape.
        local: shape of rank 0's shard.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    local: tuple[int, ...]


def micro_batch_shapes(
    config: Config, axes: Mapping[str, int], model: LlamaConfig | GPTConfig, attention: Method
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a micro-batch's tensors on rank 0, and of q and k of one attention kernel call."""
    rows, tp, ulysses = config.rows_per_batch, axes["tp"], axes["ulysses"]
    layout = attention.layout(config.data.sequence_length)
    tokens = layout.sizes[attention.shard]
    shapes = {
        "tokens": (rows, tokens),
        "hidden": (rows, -(-tokens // tp), model.dim),  # between blocks, rank 0 of tp has every tp-th token
        "queries": (rows, tokens, model.heads // tp, model.head_dim),
        "keys, values": (rows, tokens, model.kv_heads // tp, model.head_dim),
    }
    # Ulysses and UPipe attend with more tokens and fewer heads. `head_stages` knows no tensor parallelism.
    if tp == 1 and ulysses > 1:
        stage = head_stages(model.heads, model.kv_heads, ulysses, getattr(attention, "heads_per_stage", None))
        attended_tokens = layout.coarsen(ulysses).sizes[attention.shard // ulysses]  # shards may have unequal sizes
        shapes["queries in attention"] = (rows, attended_tokens, stage.queries, model.head_dim)
        shapes["keys in attention"] = (rows, attended_tokens, stage.keys, model.head_dim)
    return shapes


def largest_parameters(model: Llama | GPT) -> list[Parameter]:
    """Returns the largest parameters. One entry stands for the same parameter in all blocks."""
    counts = Counter(
        (re.sub(r"\.\d+\.", ".*.", name), tuple(parameter.shape), tuple(compat.local_part(parameter).shape))
        for name, parameter in model.named_parameters()
    )
    entries = [Parameter(name, count, shape, local) for (name, shape, local), count in counts.items()]
    return sorted(entries, key=lambda p: -p.count * prod(p.shape))[:SHOWN_PARAMETERS]
