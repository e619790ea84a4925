"""The loop of every ring: a shard is computed with, and meanwhile passed on to the next rank.

    for step in range(R):
        start sending the shard in hand to the next rank, and receiving the next one from the rank before
        compute with the shard in hand
        wait

Of a shard, no token goes further than to the last rank that sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from armillary.attention.rotation.reach import Reach
from armillary.attention.rotation.topology import Moving, RingTopology
from armillary.attention.tiling.grid import Grid
from armillary.core import Axis, FlatBuffer, start_exchange
from armillary.core.collectives.exchange import ReceiveBuffers
from armillary.core.token_ranges import TokenRanges


class RingStep(NamedTuple):
    """What one rank does at one step.

    Args:
        step: 0 .. R - 1.
        query, key: the shards that meet.
        held: tokens in hand of the shard that goes round, packed.
        leaving: those of them that go on to the next rank, as they lie there.
        ending: those that go no further, as they lie there.
        coming: how many tokens of the next shard arrive from the rank before.
        returning: tokens of this rank's own shard that have gone as far as they go.
    """

    step: int
    query: int
    key: int
    held: TokenRanges
    leaving: TokenRanges
    ending: TokenRanges
    coming: int
    returning: TokenRanges


class DirectStep(NamedTuple):
    """What one rank sees at one step of what is in hand, and the rank that has its own shard of that.

    Args:
        seen: tokens in hand that this rank sees.
        packed: those, as they lie among all that are in hand.
        theirs: tokens of this rank's own shard that the other rank sees.
    """

    seen: TokenRanges
    packed: TokenRanges
    theirs: TokenRanges


@dataclass
class InFlight:
    """The shard in hand: tensors with its tokens `held` packed on dim 1, which leave when the next one has arrived."""

    step: int
    query: int
    key: int
    held: TokenRanges
    tensors: tuple[Tensor, ...]

    def part(self, packed: TokenRanges | None) -> tuple[Tensor, ...]:
        """Some of the tokens, as they lie in what is held; None: all. Views of one run, else copies."""
        return self.tensors if packed is None else tuple([packed.take(x) for x in self.tensors])


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
        buffers = ReceiveBuffers(tensors, [step.coming for step in self.steps])
        for step in self.steps:
            hand = InFlight(step.step, step.query, step.key, step.held, shard)
            sent = None
            if step.leaving.runs:  # as it came; or where less goes on than came, or at first, a copy of what does
                sent = held.part(step.leaving) if held else FlatBuffer.of(shard, step.leaving)
            received = buffers.take(last_in_use=True)  # by this step's computation
            send, receive = {ahead: sent} if sent else {}, {behind: received} if received else {}
            exchange = start_exchange(self.axis, send, receive)
            yield hand
            exchange.wait()
            hand.tensors = ()  # two shards are alive at a time, not three
            held, shard = received, received.tensors if received else ()
            del exchange, send, receive, sent

    @cached_property
    def place(self) -> int:
        """This rank's index in the ring."""
        return self.topology.ranks.index(self.axis.rank)

    @cached_property
    def neighbours(self) -> tuple[int, int]:
        """The ranks of the axis before and after this one in the ring."""
        return self.ahead(-1), self.ahead(1)

    @cached_property
    def steps(self) -> tuple[RingStep, ...]:
        """What this rank does."""
        reach = self.topology.reach(self.grid)
        return tuple(self._step(reach, step) for step in range(len(reach)))

    def _step(self, reach: Sequence[Reach], step: int) -> RingStep:
        origin, following = self.origin(step), self.origin(step + 1)
        held, leaving, ending = reach[origin].needed(step), reach[origin].needed(step + 1), reach[origin].ending(step)
        return RingStep(
            step,
            *self.topology.query_key_shards(self.place, origin),
            held,
            leaving.within(held),
            ending.within(held),
            reach[following].counts[step + 1],
            reach[self.place].ending(step),
        )

    @cached_property
    def direct(self) -> tuple[DirectStep, ...]:
        """What this rank and the others see, where shares go straight back; at step 0 it has all of its own."""
        return tuple(map(self._direct, self.steps))

    def _direct(self, step: RingStep) -> DirectStep:
        if step.step == 0:
            return DirectStep(step.held, step.held, TokenRanges())
        other = (self.place + step.step) % len(self.steps)
        seen = self.topology.seen(self.grid, self.place, self.origin(step.step))
        return DirectStep(seen, seen.within(step.held), self.topology.seen(self.grid, other, self.place))

    def origin(self, step: int) -> int:
        """The place from which the shard set out that is in hand at `step`."""
        return self.topology.origin(self.place, step)

    def ahead(self, steps: int) -> int:
        """The rank of the axis that is so many places further round the ring."""
        return self.topology.ahead(self.place, steps)
