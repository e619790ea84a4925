"""The return of results to the ranks that own the rotating shards: gradients, or partial outputs.

While a shard rotates, each rank computes a partial result for it. There are two ways to return partial results. Both
use a separate communicator, overlap with the computation of the next step, and sum in the same order in every run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from armillary.attention.rotation.rotate import RingStep, Rotation
from armillary.core import Exchange, FlatBuffer, ReceiveBuffers, TokenRanges, accumulation_dtype, compat, start_exchange

Partials = Sequence[Tensor]
"""One rank's partial results for some tokens of one shard, [B, t, ...] each."""


class ResultTokens(NamedTuple):
    """Tokens of the current shard that a rank's partial results must cover.

    Args:
        tokens: indices of tokens in the shard.
        packed_tokens: the same, as indices into the current packed tensors; None: all of these.
    """

    tokens: TokenRanges
    packed_tokens: TokenRanges | None


class Reduction(ABC):
    """Sums the partial results of all ranks on the rank that owns the shard.

    Args:
        combine: combines another rank's partial results, for some tokens, with this rank's; called in order of steps.
            Adds them by default.
    """

    def __init__(self, rotation: Rotation, combine: Callable[[TokenRanges, Partials], None] | None = None) -> None:
        self.rotation, self.combine = rotation, combine
        self.own_partials: Partials = ()
        self.arriving: tuple[TokenRanges, FlatBuffer] | None = None  # with their tokens in `own_partials`
        self.exchange: Exchange | None = None

    @abstractmethod
    def result_tokens(self, step: int) -> ResultTokens:
        """Returns the tokens that this rank's partial results must cover at `step`."""

    @abstractmethod
    def push(self, step: int, partials: Partials) -> None:
        """Starts to return this rank's partial results for the shard of `step`. Every rank calls it at every step."""

    def finish(self) -> Partials:
        """Waits, and returns the sums over all ranks for this rank's own shard."""
        self.wait()
        return self.own_partials

    def wait(self) -> None:
        """Waits for the exchange in flight, and combines the results that it has returned with this rank's."""
        if self.exchange:
            self.exchange.wait()
            self.exchange = None
        if self.arriving:
            tokens, buffer = self.arriving
            if self.combine:
                self.combine(tokens, buffer.tensors)
            else:
                for total, partial in zip(self.own_partials, buffer.tensors, strict=True):
                    tokens.add(total, partial)
            self.arriving = None


class RingReduce(Reduction):
    """A sum follows its shard around the ring, one step later; each rank adds its partial result to it.

    The owner keeps its own partial result. When no later rank sees a token, its sum is sent to the owner directly, so
    that a sum makes as many hops as its token.
    """

    passing_sums: FlatBuffer | None = None

    def result_tokens(self, step: int) -> ResultTokens:
        return ResultTokens(self.rotation.steps[step].token_ranges, None)

    def push(self, step: int, partials: Partials) -> None:
        if step == 0:
            self.own_partials = _widen(partials)
            counts = [later.received_count for later in self.rotation.steps[1:]]
            self.buffers = ReceiveBuffers(self.own_partials, counts)
            return
        self.wait()
        rotation, schedule = self.rotation, self.rotation.steps[step]
        send = self._outgoing(schedule, partials)
        # At the last step both neighbours and the owner may be one rank, but then no sum is passed on.
        # Sums for a subset of the tokens are sent as copies, which leaves the buffer that they arrived in free.
        arrived_sums = self.passing_sums
        in_use = arrived_sums is not None and any(
            compat.share_memory(flat.buffer, arrived_sums.buffer) for flat in send.values()
        )
        self.passing_sums = self.buffers.take(last_in_use=in_use)
        receive = {rotation.ahead(-1): self.passing_sums} if self.passing_sums else {}
        if schedule.returned_tokens.runs:
            sums = FlatBuffer.like(self.own_partials, schedule.returned_tokens.count)
            self.arriving = schedule.returned_tokens, sums
            receive[rotation.ahead(step)] = sums
        self.exchange = start_exchange(rotation.return_axis, send, receive)

    def _outgoing(self, schedule: RingStep, partials: Partials) -> dict[int, FlatBuffer]:
        """Adds this rank's partial results to the sums that came with the shard.

        Returns:
            The sums to send, by receiving rank.
        """
        passing_sums, send = self.passing_sums, dict[int, FlatBuffer]()
        if passing_sums:
            for total, partial in zip(passing_sums.tensors, partials, strict=True):
                total += partial
        # Sums of tokens that a later rank sees travel with their shard; finished sums return to the owner.
        for tokens, steps in ((schedule.next_tokens, 1), (schedule.final_tokens, -schedule.step)):
            if tokens.runs:
                sums = passing_sums.part(tokens) if passing_sums else FlatBuffer.of(_widen(partials), tokens)
                send[self.rotation.ahead(steps)] = sums
        return send


class DirectReduce(Reduction):
    """Each rank sends its partial result directly to the owner, against the direction of the ring (TokenRing)."""

    def result_tokens(self, step: int) -> ResultTokens:
        schedule = self.rotation.direct_steps[step]
        return ResultTokens(schedule.visible_tokens, schedule.packed_tokens)

    def push(self, step: int, partials: Partials) -> None:
        if step == 0:
            self.own_partials = partials
            counts = [later.returned_tokens.count for later in self.rotation.direct_steps[1:]]
            self.buffers = ReceiveBuffers(partials, counts)
            return
        self.wait()
        rotation, schedule = self.rotation, self.rotation.direct_steps[step]
        buffer = self.buffers.take(last_in_use=False)  # its partial results have been added
        self.arriving = (schedule.returned_tokens, buffer) if buffer else None
        send = {rotation.ahead(-step): FlatBuffer.of(partials)} if schedule.visible_tokens.runs else {}
        receive = {rotation.ahead(step): buffer} if buffer else {}
        self.exchange = start_exchange(rotation.return_axis, send, receive)


def _widen(partials: Partials) -> Partials:
    """Returns partial results in the accumulation dtype."""
    return [partial.to(accumulation_dtype(partial.dtype)) for partial in partials]
