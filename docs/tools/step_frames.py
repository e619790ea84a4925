"""Converts a communication plan to frames, which have the transfers and the computation of each step of a method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from armillary.attention import CommPlan
from armillary.attention.plans import Kind, Move, Role, Step


class RankBlock(NamedTuple):
    """The block that a rank computes in a frame.

    Args:
        queries, keys: shards of the sequence axis, of the queries and of the keys.
        heads: query heads for which the rank computes the block.
        pairs: number of visible (query, key) pairs, summed over these heads and the batch.
    """

    rank: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: tuple[int, ...]
    pairs: int


class SentBytes(NamedTuple):
    """Bytes sent on one axis in one kind of move, since the start of forward.

    Args:
        total: bytes sent by all ranks.
        busiest: bytes sent by the rank that sent the most.
    """

    axis: Role
    kind: Kind
    total: int
    busiest: int


@dataclass(frozen=True)
class Frame:
    """One step of a method, or several joined ones: the tensors in flight and the blocks that ranks compute meanwhile.

    Args:
        phase: "forward" or "backward".
        number, last: first and last step of the frame, counted from 1.
        count: number of steps in the phase.
        moves: moves of this step, in flight.
        returning: moves of the previous step's results, in flight at the same time.
        blocks: blocks of the ranks that compute.
        sent_bytes: bytes sent from the start of forward to the end of the frame.
    """

    phase: str
    number: int
    last: int
    count: int
    moves: tuple[Move, ...]
    returning: tuple[Move, ...]
    blocks: tuple[RankBlock, ...]
    sent_bytes: tuple[SentBytes, ...]

    @property
    def title(self) -> str:
        """Title of the frame, such as "forward 2 of 8"."""
        steps = f"{self.number}" if self.last == self.number else f"{self.number}-{self.last}"
        return f"{self.phase} {steps} of {self.count}"

    @property
    def as_dict(self) -> dict[str, Any]:
        """Returns the frame as JSON values."""
        moves = ((move, late) for moves, late in ((self.moves, False), (self.returning, True)) for move in moves)
        return {
            "phase": self.phase,
            "title": self.title,
            "moves": [
                {"kind": move.kind, "axis": move.axis, "tensors": move.tensors, "late": late, "sends": move.sends}
                for move, late in moves
            ],
            "blocks": [block._asdict() for block in self.blocks],
            "sent": [total._asdict() for total in self.sent_bytes],
        }


def timeline(plan: CommPlan, heads: int, ulysses: int) -> list[Frame]:
    """Returns the frames of forward and backward.

    Args:
        heads: number of query heads.
        ulysses: number of ranks on the head axis.

    Raises:
        ValueError: the plan's steps have computation but do not name its blocks.
    """
    frames, rank_bytes = list[Frame](), Counter[tuple[Role, Kind, int]]()
    # `rank_bytes` counts from the start of forward on, through backward.
    for phase, phase_steps in (("forward", plan.forward), ("backward", plan.backward)):
        steps = list(with_returns(phase_steps))
        for i, (step, returning) in enumerate(steps):
            for move in (*step.moves, *returning):
                for send in move.sends:
                    rank_bytes[move.axis, move.kind, send.source] += send.bytes
            blocks = tuple(rank_blocks(plan, step, heads, ulysses))
            frames.append(Frame(phase, i + 1, i + 1, len(steps), step.moves, returning, blocks, sent_bytes(rank_bytes)))
    return frames


def with_returns(steps: Sequence[Step]) -> Iterator[tuple[Step, tuple[Move, ...]]]:
    """Yields each step with the moves of the previous step's results (its `later_moves`)."""
    returning = tuple[Move, ...]()
    for step in steps:
        # Results are sent while the next step computes. If the next step only communicates, they get an empty step.
        if returning and not step.pairs:
            yield Step(), returning
            returning = ()
        yield step, returning
        returning = step.later_moves
    if returning:
        yield Step(), returning


def join_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Joins successive frames that belong together, so that fewer frames are drawn.

    - A computation without sends is joined with the frame before it.
    - Successive sends of inputs, of one kind, are joined: the all-to-alls of q, k and v. Sends of results are not.
    """
    result = list[Frame]()
    for frame in frames:
        before = result[-1] if result and result[-1].phase == frame.phase else None
        has_sends = bool(frame.moves or frame.returning)
        only_sends = before and not (before.blocks or frame.blocks or before.returning or frame.returning)
        if before and (not has_sends or (only_sends and kinds(before) == kinds(frame) and not is_output(before))):
            result[-1] = replace(
                before,
                last=frame.last,
                moves=(*before.moves, *frame.moves),
                blocks=(*before.blocks, *frame.blocks),
                sent_bytes=frame.sent_bytes,
            )
        else:
            result.append(frame)
    return result


def kinds(frame: Frame) -> set[Kind]:
    """Returns the kinds of a frame's moves."""
    return {move.kind for move in frame.moves}


def is_output(frame: Frame) -> bool:
    """Returns True if a frame sends out or gradients: results of the computation before it."""
    return any(tensor in ("out", "dq", "dk", "dv") for move in frame.moves for tensor in move.tensors)


def rank_blocks(plan: CommPlan, step: Step, heads: int, ulysses: int) -> Iterator[RankBlock]:
    """Yields the block of each rank that computes in a step."""
    if step.pairs and not step.blocks:
        raise ValueError("the steps of this method's comm_plan have no blocks, which pictures need")
    for rank, (pairs, block) in enumerate(zip(step.pairs, step.blocks, strict=True)):
        if block is None or not pairs:
            continue
        # A block is (query shard, key shard). If the plan has tables of shards, these are indices into the tables.
        queries, keys = (
            (shard,) if shards is None else shards[shard]
            for shard, shards in zip(block, (plan.query_shards, plan.key_shards), strict=True)
        )
        rank_heads = step.heads[rank % ulysses] if step.heads else range(heads)
        yield RankBlock(rank, queries, keys, tuple(rank_heads), pairs)


def sent_bytes(rank_bytes: Counter[tuple[Role, Kind, int]]) -> tuple[SentBytes, ...]:
    """Returns the sum and the maximum over ranks, for each axis and kind of move.

    Args:
        rank_bytes: bytes by (axis, kind, rank).
    """
    sizes_of_ranks = dict[tuple[Role, Kind], list[int]]()
    for (axis, kind, _), size in rank_bytes.items():
        sizes_of_ranks.setdefault((axis, kind), []).append(size)
    return tuple(SentBytes(axis, kind, sum(sizes), max(sizes)) for (axis, kind), sizes in sizes_of_ranks.items())
