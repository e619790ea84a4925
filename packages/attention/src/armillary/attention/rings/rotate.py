"""The loop that all rings share: each rank computes with a shard while it sends the shard to the next rank.

    for step in range(R):
        start to send the current shard to the next rank, and to receive the next shard from the previous rank
        compute with the current shard
        wait for both transfers

The next rank of rank r is r + 1, or r - 1 if that direction sends fewer tokens (`RingTopology`).

No token is sent further than to the last rank that sees it. So the tensors of a shard are *packed*: they contain only
the tokens that this rank or a later one needs. A packed index is the index of a token in the packed tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from armillary.attention.rings.topology import RingTopology
from armillary.attention.tiling.grid import Grid
from armillary.core import Axis, FlatBuffer, ReceiveBuffers, TokenRanges, start_exchange


class RingStep(NamedTuple):
    """Schedule of one rank at one step.

    Args:
        step: 0 .. R - 1.
        query_shard: the shard of queries that this rank has at the step.
        key_shard: the shard of keys that this rank has at the step.
        token_ranges: indices in the rotating shard of the tokens that this rank has.
        next_tokens: packed indices of the tokens that the next rank, or one after it, sees.
        final_tokens: packed indices of the other tokens, which no later rank sees.
        received_count: number of tokens that arrive from the previous rank during the step.
        returned_tokens: indices in this rank's own shard of the tokens whose last step this is. After step 0 they are
            on another rank, which returns their result to this one.
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
    """Tokens of one step whose results return directly to the owner of their shard, instead of around the ring.

    Args:
        visible_tokens: indices in the rotating shard of the tokens in a visible pair on this rank; all at step 0.
        packed_tokens: the same tokens, as packed indices.
        returned_tokens: indices in this rank's own shard of the tokens that are in a visible pair on the rank where the
            shard is. That rank sends their results to this one.
    """

    visible_tokens: TokenRanges
    packed_tokens: TokenRanges
    returned_tokens: TokenRanges


@dataclass
class RotatingShard:
    """The rotating shard with which a rank computes at one step.

    Args:
        step: 0 .. R - 1.
        query_shard, key_shard, token_ranges: as in `RingStep`.
        tensors: [B, t, ...] each, with the t tokens of `token_ranges` packed on dim 1. Removed after the step.
    """

    step: int
    query_shard: int
    key_shard: int
    token_ranges: TokenRanges
    tensors: tuple[Tensor, ...]

    def take(self, packed_tokens: TokenRanges | None) -> tuple[Tensor, ...]:
        """Returns the tokens with these packed indices; for None all tensors as they are.

        Views if the tokens are at most one run, otherwise copies.
        """
        if packed_tokens is None or packed_tokens.count == self.token_ranges.count:
            return self.tensors
        return tuple([packed_tokens.take(x) for x in self.tensors])


@dataclass(frozen=True)
class Rotation:
    """A ring of R ranks as one of them sees it, for calls with one mask and layout.

    Args:
        axis: mesh axis of the ring.
        return_axis: the same axis with a second communicator, on which results return. On one communicator the results
            would wait behind the send of the shard.
        topology: the ring, in the direction that sends fewer tokens.
        grid: visible pairs of each (query shard, key shard).
    """

    axis: Axis
    return_axis: Axis
    topology: RingTopology
    grid: Grid

    @classmethod
    def of(cls, axis: Axis, return_axis: Axis, topology: RingTopology, grid: Grid) -> Rotation:
        """Returns the rotation around `topology` or around its opposite, whichever sends fewer tokens."""
        return cls(axis, return_axis, topology.cheaper_direction(grid), grid)

    def rotate(self, *tensors: Tensor) -> Iterator[RotatingShard]:
        """Yields the shard of each step, this rank's own first. Sends it and receives the next one in the meantime.

        Args:
            tensors: [B, T, ...] each, this rank's own shard.

        Bytes sent, p2p: at each step except the last, the tokens that the next rank or one after it sees.
        """
        current, buffer, (previous_rank, next_rank) = tensors, None, self.neighbours
        buffers = ReceiveBuffers(tensors, [step.received_count for step in self.steps])
        for step in self.steps:
            shard = RotatingShard(step.step, step.query_shard, step.key_shard, step.token_ranges, current)
            # 1. Start both transfers before anything is computed. At step 0 this rank's own tensors are copied into a
            # buffer, unless it is one contiguous tensor. Later the received buffer is forwarded. If the next rank needs
            # fewer tokens, these are copied.
            send_buffer = None
            if step.next_tokens.runs:
                send_buffer = buffer.part(step.next_tokens) if buffer else FlatBuffer.of(current, step.next_tokens)
            receive_buffer = buffers.take(last_in_use=True)  # kernels still read the last buffer, and it is being sent
            send = {next_rank: send_buffer} if send_buffer else {}
            receive = {previous_rank: receive_buffer} if receive_buffer else {}
            exchange = start_exchange(self.axis, send, receive)
            yield shard  # 2. the caller computes with the current shard
            exchange.wait()  # 3. the next shard has arrived, and the current one has left
            # Drop every reference to the current shard, so that two shards are in memory at a time instead of three.
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
        """The ranks before and after this one around the ring, as ranks of the axis."""
        return self.ahead(-1), self.ahead(1)

    @cached_property
    def steps(self) -> tuple[RingStep, ...]:
        """This rank's schedule: one entry for each of the R steps."""
        reach, steps = self.topology.reach(self.grid), list[RingStep]()
        for step in range(len(self.topology.ranks)):
            origin, next_origin = self.origin(step), self.origin(step + 1)
            token_ranges = reach[origin].tokens_at(step)
            steps.append(
                RingStep(
                    step,
                    *self.topology.query_key_shards(self.ring_index, origin),
                    token_ranges,
                    reach[origin].tokens_at(step + 1).within(token_ranges),
                    reach[origin].final_tokens_at(step).within(token_ranges),
                    reach[next_origin].counts[step + 1],
                    reach[self.ring_index].final_tokens_at(step),
                )
            )
        return tuple(steps)

    @cached_property
    def direct_steps(self) -> tuple[DirectStep, ...]:
        """The tokens whose results return directly, for each step. At step 0 the shard is this rank's own: none do."""
        own_step, *later_steps = self.steps
        steps = [DirectStep(own_step.token_ranges, own_step.token_ranges, TokenRanges())]
        for step in later_steps:
            visible = self.topology.visible_tokens(self.grid, self.ring_index, self.origin(step.step))
            # After s steps this rank's own shard is on the rank s hops after it.
            holder = (self.ring_index + step.step) % len(self.steps)
            returned_tokens = self.topology.visible_tokens(self.grid, holder, self.ring_index)
            steps.append(DirectStep(visible, visible.within(step.token_ranges), returned_tokens))
        return tuple(steps)

    def origin(self, step: int) -> int:
        """Returns the ring index of the owner of the shard that is on this rank at `step`."""
        return self.topology.origin(self.ring_index, step)

    def ahead(self, steps: int) -> int:
        """Returns the rank of the axis that is `steps` hops after this rank."""
        return self.topology.ahead(self.ring_index, steps)
