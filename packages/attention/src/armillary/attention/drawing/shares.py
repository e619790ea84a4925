"""The work of each rank and step under a mask, from the method's communication plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from armillary.attention.mask import AttentionMask
from armillary.attention.planning.comm_plan import AttentionShape, join_shards
from armillary.attention.registry import DEFAULT_OPTIONS, MethodOptions, named_method
from armillary.core import SequenceLayout


class BlockWork(NamedTuple):
    """A block of forward: the rank of the sequence axis and the step that compute it, and its two shards.

    Args:
        query, key: shard numbers in `ComputedBlocks.layout` and `ComputedBlocks.key_layout`.
    """

    rank: int
    step: int
    query: int
    key: int


@dataclass(frozen=True)
class ComputedBlocks:
    """The blocks that a method computes in forward, from its communication plan.

    Args:
        layout, key_layout: layouts of the query shards and of the key shards that blocks refer to by number.
        blocks: the block of each rank in each step, with or without visible pairs.
        pairs: `pairs[step][rank]`, the number of visible pairs in one head and one row of the batch.
    """

    layout: SequenceLayout
    key_layout: SequenceLayout
    blocks: tuple[BlockWork, ...]
    pairs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Shares:
    """The tokens and the visible pairs of each rank of the sequence axis.

    Args:
        length: tokens of the sequence.
        pairs: visible (query, key) pairs in one row of the batch.
        tokens: number of tokens of each rank.
        by_step: `by_step[rank][step]`, the number of visible pairs that a rank computes in a step.
    """

    length: int
    pairs: int
    tokens: tuple[int, ...]
    by_step: tuple[tuple[int, ...], ...]

    @property
    def by_rank(self) -> tuple[int, ...]:
        """Number of visible pairs that each rank computes in all steps."""
        return tuple(map(sum, self.by_step))

    @property
    def imbalance(self) -> float:
        """The largest number of pairs of a rank, divided by the mean over ranks: 1 if all ranks have equal work."""
        return max(self.by_rank) * len(self.by_rank) / max(self.pairs, 1)

    @property
    def as_dict(self) -> dict[str, Any]:
        """All fields and properties, for JSON."""
        return asdict(self) | {"by_rank": self.by_rank, "imbalance": self.imbalance}


def blocks_of(
    layout: SequenceLayout, mask: AttentionMask, method: str, options: MethodOptions = DEFAULT_OPTIONS
) -> ComputedBlocks:
    """Returns the blocks that a method computes in forward. The ranks of a head axis count as one rank.

    Args:
        method: a name of `build_attention`.

    Raises:
        ValueError: the name is unknown, the method has no sequence axis for the layout's shards, or its communication
            plan lists no blocks.
    """
    method_entry = named_method(method, options)
    method_entry.check_used(method_entry.mesh_axes({"ring": layout.shards}))
    work = AttentionShape.of(layout, mask, heads=1, kv_heads=1, head_dim=1, dtype=torch.float32)
    plan = method_entry.sequence_plan(layout.shards).comm_plan(work)
    steps = [step for step in plan.forward if step.pairs]  # the others only communicate
    if not all(step.blocks for step in steps):
        raise ValueError(f"attention method {method!r} cannot be drawn: the steps of its comm_plan have no blocks")
    return ComputedBlocks(
        join_shards(layout, plan.query_shards),
        join_shards(layout, plan.key_shards),
        tuple(
            BlockWork(rank, i, *block)
            for i, step in enumerate(steps)
            for rank, block in enumerate(step.blocks)
            if block
        ),
        tuple(step.pairs for step in steps),
    )


def shares_of(
    mask: AttentionMask,
    layout: SequenceLayout,
    method: str = "ring",
    row: int = 0,
    options: MethodOptions = DEFAULT_OPTIONS,
) -> Shares:
    """Returns the work of each rank in forward, for one row of the batch and one head.

    Args:
        layout: layout over the sequence axis, with one shard for each of its ranks.
        method: a name of `build_attention`.

    Raises:
        ValueError: the mask has another length than the layout; errors of `blocks_of`.
    """
    mask = mask.row(row)
    by_step = blocks_of(layout, mask, method, options).pairs
    return Shares(layout.length, mask.pairs(layout.length), layout.sizes, tuple(zip(*by_step, strict=True)))
