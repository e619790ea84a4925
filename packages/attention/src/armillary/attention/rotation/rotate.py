"""The loop that all rings share: each rank computes with a shard while it sends the shard to the next rank.

    for step in range(R):
        start sending the current shard to rank r + 1 and receiving the next shard from rank r - 1
        compute with the current shard
        wait

No token is sent further than to the last rank that sees it. So the current shard is packed: it contains only the tokens
that this rank or a later one needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from armillary.attention.rotation.topology import RingTopology
from armillary.attention.tiling.grid import Grid
from armillary.core import Axis, FlatBuffer, ReceiveBuffers, TokenRanges, start_exchange


class RingStep(NamedTuple):
    """Schedule of one rank at one step.

    Args:
        step: 0 .. R - 1.
        query_shard, key_shard: the shards that meet.
        token_ranges: tokens of the rotating shard that are on this rank, packed.
        next_tokens: the tokens among them that the next rank needs, as packed indices.
        final_tokens: the tokens among them that no later rank needs, as packed indices.
        received_count: number of tokens that arrive from the previous rank during the step.
        returned_tokens: tokens of this rank's own shard whose last step this is, on the rank that has them now.
    """

    step: int
    query_shard: int
    key_shard: int
    token_ranges: TokenRanges
    next_tokens: TokenRanges
    final_tokens: TokenRanges
    received_count: int
    returned_tokens: TokenRanges


class DirectStep(NamedTuple):
    """Tokens for which one rank exchanges results directly with the owner of the rotating shard.

    Args:
        visible_tokens: tokens of the rotating shard that this rank sees.
        packed_tokens: the same, as packed indices.
        returned_tokens: tokens of this rank's own shard that the rank which has it now sees.
    """

    visible_tokens: TokenRanges
    packed_tokens: TokenRanges
    returned_tokens: TokenRanges


@dataclass
class RotatingShard:
    """The shard that a rank computes with at one step.

    Args:
        step: 0 .. R - 1.
        query_shard, key_shard: the shards that meet.
        token_ranges: tokens of the rotating shard that are here.
        tensors: [B, t, ...] each, with these tokens packed on dim 1. Dropped after the step.
    """

    step: int
    query_shard: int
    key_shard: int
    token_ranges: TokenRanges
    tensors: tuple[Tensor, ...]

    def take(self, packed_tokens: TokenRanges | None) -> tuple[Tensor, ...]:
        """Returns the tensors at some packed indices; None: all. Views of a single run, otherwise copies."""
        if packed_tokens is None or packed_tokens.count == self.token_ranges.count:
            return self.tensors
        return tuple([packed_tokens.take(x) for x in self.tensors])


@dataclass(frozen=True)
class Rotation:
    """A ring of R ranks as one of them sees it, for calls with one mask and layout.

    Args:
        axis: mesh axis of the ring.
        return_axis: the same axis with a second communicator. Results return on it: on one communicator they would
            queue behind the next shard.
        topology: the ring, turning in the direction that sends fewer tokens.
        grid: visible pairs of each (query shard, key shard).
    """

    axis: Axis
    return_axis: Axis
    topology: RingTopology
    grid: Grid

    @classmethod
    def of(cls, axis: Axis, return_axis: Axis, topology: RingTopology, grid: Grid) -> Rotation:
        """Returns the rotation that turns the ring in its cheaper direction."""
        return cls(axis, return_axis, topology.cheaper_direction(grid), grid)

    def rotate(self, *tensors: Tensor) -> Iterator[RotatingShard]:
        """Yields the shard of each step, starting with this rank's own, while the next shard is received.

        Args:
            tensors: [B, T, ...] each, this rank's own shard.

        Bytes sent: the tokens that the next rank needs, at every step except the last; p2p.
        """
        current, buffer, (previous_rank, next_rank) = tensors, None, self.neighbours
        buffers = ReceiveBuffers(tensors, [step.received_count for step in self.steps])
        for step in self.steps:
            shard = RotatingShard(step.step, step.query_shard, step.key_shard, step.token_ranges, current)
            # 1. Start both transfers before anything is computed. A received buffer is forwarded without a copy unless
            # the next rank needs fewer of its tokens; this rank's own tensors are copied into a buffer.
            send_buffer = None
            if step.next_tokens.runs:
                send_buffer = buffer.part(step.next_tokens) if buffer else FlatBuffer.of(current, step.next_tokens)
            receive_buffer = buffers.take(last_in_use=True)  # the last buffer is still read by kernels, and sent
            send = {next_rank: send_buffer} if send_buffer else {}
            receive = {previous_rank: receive_buffer} if receive_buffer else {}
            exchange = start_exchange(self.axis, send, receive)
            yield shard  # 2. the caller computes with the current shard
            exchange.wait()  # 3. the next shard has arrived, and the current one has left
            # Drop every reference to the current shard, so that two shards are alive at a time instead of three.
            shard.tensors = ()
            buffer = receive_buffer
            current = buffer.tensors if buffer else tuple([x[:, :0] for x in tensors])
            del exchange, send, receive, send_buffer

    @cached_property
    def ring_index(self) -> int:
        """This rank's index in the ring."""
        return self.topology.ranks.index(self.axis.rank)

    @cached_property
    def neighbours(self) -> tuple[int, int]:
        """The (previous, next) rank of the axis around the ring."""
        return self.ahead(-1), self.ahead(1)

    @cached_property
    def steps(self) -> tuple[RingStep, ...]:
        """This rank's schedule: one entry for each of the R steps."""
        return tuple(self._step(step) for step in range(len(self.topology.ranks)))

    def _step(self, step: int) -> RingStep:
        reach = self.topology.reach(self.grid)
        origin, next_origin = self.origin(step), self.origin(step + 1)
        token_ranges = reach[origin].tokens_at(step)
        return RingStep(
            step,
            *self.topology.query_key_shards(self.ring_index, origin),
            token_ranges,
            reach[origin].tokens_at(step + 1).within(token_ranges),
            reach[origin].final_tokens_at(step).within(token_ranges),
            reach[next_origin].counts[step + 1],
            reach[self.ring_index].final_tokens_at(step),
        )

    @cached_property
    def direct_steps(self) -> tuple[DirectStep, ...]:
        """Tokens whose results return directly to their owners, for each step. At step 0 all stay on this rank."""
        return tuple(map(self._direct_step, self.steps))

    def _direct_step(self, step: RingStep) -> DirectStep:
        if step.step == 0:
            return DirectStep(step.token_ranges, step.token_ranges, TokenRanges())
        visible = self.topology.visible_tokens(self.grid, self.ring_index, self.origin(step.step))
        holder = (self.ring_index + step.step) % len(self.steps)  # the rank of the ring that has this rank's own shard
        returned_tokens = self.topology.visible_tokens(self.grid, holder, self.ring_index)
        return DirectStep(visible, visible.within(step.token_ranges), returned_tokens)

    def origin(self, step: int) -> int:
        """Returns the ring index of the owner of the shard that is on this rank at `step`."""
        return self.topology.origin(self.ring_index, step)

    def ahead(self, steps: int) -> int:
        """Returns the rank of the axis that is `steps` hops after this rank."""
        return self.topology.ahead(self.ring_index, steps)
