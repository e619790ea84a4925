"""The return of partial results, gradients or outputs, to the ranks that own the rotating shards.

Each rank that a shard visits computes a partial result for its tokens. `RingReduce` adds it to a sum that travels with
the shard; `DirectReduce` sends it to the owner of the shard at once. Both use a separate communicator, overlap with the
computation of the next step, and add in the same order in every run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.attention.rings.rotate import Rotation
from armillary.core import Exchange, FlatBuffer, ReceiveBuffers, TokenRanges, accumulation_dtype, start_exchange
from armillary.core.internal import compat

Partials = Sequence[Tensor]
"""One rank's partial results for some tokens of one shard, [B, t, ...] each."""


class ResultTokens(NamedTuple):
    """The tokens of the current shard for which a rank must compute partial results.

    Args:
        tokens: indices in the shard.
        packed_tokens: the same tokens, as packed indices; None: all packed tokens.
    """

    tokens: TokenRanges
    packed_tokens: TokenRanges | None


class Reduction(ABC):
    """Sums the partial results that all ranks compute for a shard, on the rank that owns the shard.

    Args:
        rotation: the ring.
        combine: function of (tokens, partial results of another rank for them), which merges them into this rank's
            result. Called in order of steps. By default the partial results are added.
    """

    def __init__(self, rotation: Rotation, combine: Callable[[TokenRanges, Partials], None] | None = None) -> None:
        self.rotation, self.combine = rotation, combine
        self.own_partials: Partials = ()
        self.arriving: tuple[TokenRanges, FlatBuffer] | None = None  # tokens of this rank's shard, and their results
        self.exchange: Exchange | None = None

    @abstractmethod
    def result_tokens(self, step: int) -> ResultTokens:
        """Returns the tokens for which this rank must compute partial results at `step`."""

    @abstractmethod
    def push(self, step: int, partials: Partials) -> None:
        """Starts to send this rank's partial results for the shard of `step`. Every rank calls it at every step."""

    def finish(self) -> Partials:
        """Waits for the last exchange, and returns the sums over all ranks for this rank's own shard.

        Empty with `combine`, which has merged all results elsewhere.
        """
        self.wait()
        return self.own_partials

    def wait(self) -> None:
        """Waits for the exchange in flight, and combines the results that have arrived with this rank's."""
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
    """Sums travel around the ring one step after their shard, and each rank adds its partial results to them.

    The owner of the shard keeps its own partial results. The last rank that sees a token sends the token's sum directly
    to the owner.
    """

    passing_sums: FlatBuffer | None = None
    """Sums over earlier ranks for the tokens of the current shard, which arrive from the previous rank."""

    def result_tokens(self, step: int) -> ResultTokens:
        return ResultTokens(self.rotation.steps[step].token_ranges, None)

    def push(self, step: int, partials: Partials) -> None:
        if step == 0:
            self.own_partials = _widen(partials)
            counts = [later.received_count for later in self.rotation.steps[1:]]
            self.buffers = ReceiveBuffers(self.own_partials, counts)
            return
        self.wait()
        rotation, schedule, arrived_sums = self.rotation, self.rotation.steps[step], self.passing_sums
        # 1. Add this rank's partial results to the sums of earlier ranks, which have arrived.
        if arrived_sums:
            for total, partial in zip(arrived_sums.tensors, partials, strict=True):
                total += partial
        # 2. Sums of tokens that a later rank sees go to the next rank, 1 hop ahead. Final sums go back to the owner,
        # which is `step` hops behind.
        send = dict[int, FlatBuffer]()
        for tokens, hops in ((schedule.next_tokens, 1), (schedule.final_tokens, -step)):
            if tokens.runs:
                sums = arrived_sums.part(tokens) if arrived_sums else FlatBuffer.of(_widen(partials), tokens)
                send[rotation.ahead(hops)] = sums
        # 3. Receive the next sums. If all arrived sums go to one rank, their buffer itself is sent, and is still in
        # use. If some go to one rank and some to another, they are copied, and the buffer is free for the next sums.
        in_use = arrived_sums is not None and any(
            compat.share_memory(flat.buffer, arrived_sums.buffer) for flat in send.values()
        )
        self.passing_sums = self.buffers.take(last_in_use=in_use)
        # One buffer per rank is enough in `send` and `receive`: the owner of the shard is also the next rank only at
        # the last step, at which no sum goes to the next rank.
        receive = {rotation.ahead(-1): self.passing_sums} if self.passing_sums else {}
        if schedule.returned_tokens.runs:
            final_sums = FlatBuffer.like(self.own_partials, schedule.returned_tokens.count)
            self.arriving = schedule.returned_tokens, final_sums
            receive[rotation.ahead(step)] = final_sums
        self.exchange = start_exchange(rotation.return_axis, send, receive)


class DirectReduce(Reduction):
    """Each rank sends its partial results directly to the owner, against the direction of the ring (TokenRing)."""

    def result_tokens(self, step: int) -> ResultTokens:
        schedule = self.rotation.direct_steps[step]
        return ResultTokens(schedule.visible_tokens, schedule.packed_tokens)

    def push(self, step: int, partials: Partials) -> None:
        if step == 0:
            counts = [later.returned_tokens.count for later in self.rotation.direct_steps[1:]]
            if self.combine:
                # `combine` has this rank's own result. Buffers need its shapes alone, so do not keep its memory.
                partials = [torch.empty_like(partial[:, :0]) for partial in partials]
            else:
                self.own_partials = partials
            self.buffers = ReceiveBuffers(partials, counts)
            return
        self.wait()
        rotation, schedule = self.rotation, self.rotation.direct_steps[step]
        buffer = self.buffers.take(last_in_use=False)  # free: `wait` has combined the results that it had
        self.arriving = (schedule.returned_tokens, buffer) if buffer else None
        send = {rotation.ahead(-step): FlatBuffer.of(partials)} if schedule.visible_tokens.runs else {}
        receive = {rotation.ahead(step): buffer} if buffer else {}
        self.exchange = start_exchange(rotation.return_axis, send, receive)


def _widen(partials: Partials) -> Partials:
    """Returns partial results in the accumulation dtype."""
    return [partial.to(accumulation_dtype(partial.dtype)) for partial in partials]
