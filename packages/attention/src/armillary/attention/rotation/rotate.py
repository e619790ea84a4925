"""The loop of every ring: a shard is computed with, and meanwhile passed on to the next rank.

    for step in range(R):
        start sending the shard in hand to the next rank, and receiving the next one from the rank before
        compute with the shard in hand
        wait

Of a shard, no more goes on than what some rank further on sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from armillary.attention.rotation.topology import Moving, RingTopology
from armillary.attention.tiling.grid import Grid
from armillary.core import Axis, FlatBuffer, start_exchange


class RingStep(NamedTuple):
    """What one rank does at one step.

    Args:
        step: 0 .. R - 1.
        query, key: the shards that meet.
        held: tokens in hand of the shard that goes round.
        leaving: those of them that go on to the next rank.
        coming: tokens of the next shard that arrive from the rank before.
    """

    step: int
    query: int
    key: int
    held: range
    leaving: range
    coming: range


@dataclass
class InFlight:
    """The shard in hand: tensors with its tokens `tokens` on dim 1, which leave when the next one has arrived."""

    step: int
    query: int
    key: int
    tokens: range
    tensors: tuple[Tensor, ...]

    def part(self, tokens: range) -> tuple[Tensor, ...]:
        """Views of some of the tokens."""
        return tuple([tokens_of(x, self.tokens, tokens) for x in self.tensors])


@dataclass(frozen=True)
class Rotation:
    """A ring of R ranks, as one of them sees it, for calls of one mask and layout.

    Args:
        axis: the mesh axis that it is on.
        return_axis: the same axis with another communicator, for what goes back to its owner.
        topology: who passes what to whom, in the direction that sends less.
        grid: what shards see of each other.
    """

    axis: Axis
    return_axis: Axis
    topology: RingTopology
    grid: Grid

    @classmethod
    def of(cls, axis: Axis, return_axis: Axis, topology: RingTopology, grid: Grid) -> Rotation:
        """The ring, turning the way that sends fewer tokens."""
        return cls(axis, return_axis, topology.shorter_way(grid), grid)

    @classmethod
    def of_all(cls, axis: Axis, return_axis: Axis, moving: Moving, grid: Grid) -> Rotation:
        """All ranks of the axis in a ring, each with its own shard."""
        return cls.of(axis, return_axis, RingTopology.of_all(axis.size, moving), grid)

    def rotate(self, *tensors: Tensor) -> Iterator[InFlight]:
        """What is in hand at each step, at first `tensors`; the next shard is under way meanwhile."""
        shard, held, (behind, ahead) = tensors, None, self.neighbours
        for step in self.steps:
            hand = InFlight(step.step, step.query, step.key, step.held, shard)
            sent = self._sent(step, held, hand) if step.leaving else None
            received = FlatBuffer.like(tensors, len(step.coming)) if step.coming else None
            send, receive = {ahead: sent} if sent else {}, {behind: received} if received else {}
            exchange = start_exchange(self.axis, send, receive)
            yield hand
            exchange.wait()
            hand.tensors = ()  # two shards are alive at a time, not three
            held, shard = received, received.tensors if received else ()
            del exchange, send, receive, sent

    @staticmethod
    def _sent(step: RingStep, held: FlatBuffer | None, hand: InFlight) -> FlatBuffer:
        """What goes on: as it came, or where less goes on than came, or at first, a copy of what does."""
        if held is None:
            return FlatBuffer.of(hand.part(step.leaving))
        if step.leaving == step.held:
            return held
        return held.part(step.leaving.start - step.held.start, len(step.leaving))

    @cached_property
    def place(self) -> int:
        """This rank's index in the ring."""
        return self.topology.ranks.index(self.axis.rank)

    @cached_property
    def neighbours(self) -> tuple[int, int]:
        """The ranks of the axis before and after this one in the ring."""
        return self.ahead(-1), self.ahead(1)

    @cached_property
    def needed(self) -> tuple[tuple[range, ...], ...]:
        """For the shard from each place: its tokens that any rank so many steps on, or further, sees."""
        return self.topology.needed(self.grid)

    @cached_property
    def steps(self) -> tuple[RingStep, ...]:
        """What this rank does."""
        return tuple(self._step(step) for step in range(len(self.topology.ranks)))

    def _step(self, step: int) -> RingStep:
        origin, following, needed = self.origin(step), self.origin(step + 1), self.needed
        held, leaving = needed[origin][step : step + 2]
        shards = self.topology.query_key_shards(self.place, origin)
        return RingStep(step, *shards, held, leaving, needed[following][step + 1])

    def origin(self, step: int) -> int:
        """The place from which the shard set out that is in hand at `step`."""
        return self.topology.origin(self.place, step)

    def ahead(self, steps: int) -> int:
        """The rank of the axis that is so many places further round the ring."""
        return self.topology.ahead(self.place, steps)

    def seen(self, place: int, origin: int) -> range:
        """Tokens of the shard from `origin` that the rank at `place` sees."""
        return self.topology.seen(self.grid, place, origin)


def tokens_of(x: Tensor, held: range, wanted: range) -> Tensor:
    """Some of the tokens that `x` holds on dim 1."""
    return x if wanted == held else x.narrow(1, wanted.start - held.start, len(wanted))
