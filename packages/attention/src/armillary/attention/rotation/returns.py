"""The return of results to the ranks that own the rotating shards: gradients, or partial outputs.

While a shard rotates, each rank computes a partial result for it. There are two ways to return partial results. Both
use a separate communicator, overlap with the computation of the next step, and sum in the same order in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

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


class Reduction(Protocol):
    """Sums the partial results of all ranks on the rank that owns the shard."""

    def result_tokens(self, step: int) -> ResultTokens:
        """Returns the tokens that this rank's partial results must cover at `step`."""
        ...

    def push(self, step: int, partials: Partials) -> None:
        """Starts to return this rank's partial results for the shard of `step`. Every rank calls it at every step."""
        ...

    def finish(self) -> Partials:
        """Waits, and returns the sums over all ranks for this rank's own shard."""
        ...


class RingReduce:
    """A sum follows its shard around the ring, one step later; each rank adds its partial result to it.

    The owner keeps its own partial result. When no later rank sees a token, its sum is sent to the owner directly, so
    that a sum makes as many hops as its token.
    """

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation
        self.own_partials: Partials = ()
        self.passing_sums: FlatBuffer | None = None
        self.returned_sums: tuple[TokenRanges, FlatBuffer] | None = None  # with their tokens in `own_partials`
        self.exchange: Exchange | None = None

    def result_tokens(self, step: int) -> ResultTokens:
        return ResultTokens(self.rotation.steps[step].token_ranges, None)

    def push(self, step: int, partials: Partials) -> None:
        if step == 0:
            self.own_partials = _widened(partials)
            counts = [later.received_count for later in self.rotation.steps[1:]]
            self.buffers = ReceiveBuffers(self.own_partials, counts)
            return
        self._wait()
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
            self.returned_sums = schedule.returned_tokens, sums
            receive[rotation.ahead(step)] = sums
        self.exchange = start_exchange(rotation.return_axis, send, receive)

    def finish(self) -> Partials:
        self._wait()
        return self.own_partials

    def _outgoing(self, schedule: RingStep, partials: Partials) -> dict[int, FlatBuffer]:
        """Adds this rank's partial results to the sums that came with the shard.

        Returns:
            The sums to send, by receiving rank.
        """
        passing_sums, send = self.passing_sums, dict[int, FlatBuffer]()
        if passing_sums:
            for total, partial in zip(passing_sums.tensors, partials, strict=True):
                total += partial

        def sums(tokens: TokenRanges) -> FlatBuffer:
            return passing_sums.part(tokens) if passing_sums else FlatBuffer.of(_widened(partials), tokens)

        if schedule.next_tokens.runs:
            send[self.rotation.ahead(1)] = sums(schedule.next_tokens)
        if schedule.final_tokens.runs:
            send[self.rotation.ahead(-schedule.step)] = sums(schedule.final_tokens)
        return send

    def _wait(self) -> None:
        if self.exchange:
            self.exchange.wait()
            self.exchange = None
        if self.returned_sums:
            tokens, sums = self.returned_sums
            _add_at(self.own_partials, tokens, sums.tensors)
            self.returned_sums = None


class DirectReduce:
    """Each rank sends its partial result directly to the owner, against the direction of the ring (TokenRing).

    Args:
        combine: combines another rank's partial results, for some tokens, with this rank's; called in order of steps.
            Adds them by default.
    """

    def __init__(self, rotation: Rotation, combine: Callable[[TokenRanges, Partials], None] | None = None) -> None:
        self.rotation, self.combine = rotation, combine
        self.own_partials: Partials = ()
        self.returned_partials: tuple[TokenRanges, FlatBuffer] | None = None  # with their tokens in `own_partials`
        self.exchange: Exchange | None = None

    def result_tokens(self, step: int) -> ResultTokens:
        schedule = self.rotation.direct_steps[step]
        return ResultTokens(schedule.visible_tokens, schedule.packed_tokens)

    def push(self, step: int, partials: Partials) -> None:
        if step == 0:
            self.own_partials = partials
            counts = [later.returned_tokens.count for later in self.rotation.direct_steps[1:]]
            self.buffers = ReceiveBuffers(partials, counts)
            return
        self._wait()
        rotation, tokens = self.rotation, self.rotation.direct_steps[step].returned_tokens
        buffer = self.buffers.take(last_in_use=False)  # its partial results have been added
        self.returned_partials = None if buffer is None else (tokens, buffer)
        visible = rotation.direct_steps[step].visible_tokens.runs
        send = {rotation.ahead(-step): FlatBuffer.of(partials)} if visible else {}
        receive = {rotation.ahead(step): self.returned_partials[1]} if self.returned_partials else {}
        self.exchange = start_exchange(rotation.return_axis, send, receive)

    def finish(self) -> Partials:
        self._wait()
        return self.own_partials

    def _wait(self) -> None:
        if self.exchange:
            self.exchange.wait()
            self.exchange = None
        if self.returned_partials:
            tokens, partials = self.returned_partials
            if self.combine:
                self.combine(tokens, partials.tensors)
            else:
                _add_at(self.own_partials, tokens, partials.tensors)
            self.returned_partials = None


def _widened(partials: Partials) -> Partials:
    """Returns partial results in the accumulation dtype."""
    return [partial.to(accumulation_dtype(partial.dtype)) for partial in partials]


def _add_at(totals: Partials, tokens: TokenRanges, partials: Partials) -> None:
    for total, partial in zip(totals, partials, strict=True):
        tokens.add(total, partial)
