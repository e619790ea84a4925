"""Moves tokens between the ranks of an axis by a table: any tokens to any ranks, copies included, in one all-to-all.

Every rank computes its `MoveTable` on the host from the layout, without communication. A token is sent once to each
rank that needs it, even if that rank uses it several times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from armillary.core import compat
from armillary.core.accumulate import accumulation_dtype
from armillary.core.collectives.collective import Collective, start_parts
from armillary.core.layout import SequenceLayout
from armillary.core.mesh import Axis
from armillary.core.slices import Integers

AssembleReceived = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class MoveTable:
    """The tokens that one rank sends and receives, and its result. Tokens are on dim 0, those of all rows in turn.

    Args:
        tokens: number of this rank's own tokens.
        send: indices of own tokens to send, by target rank.
        send_counts, receive_counts: number of tokens to and from each rank.
        result: for each token of the result its index in the concatenation of own tokens, received tokens and the fill.
        has_copies: True if some token is in several results, or several times in one, so that its gradient is a sum.
        is_local: True if no rank sends anything.
    """

    tokens: int
    send: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    result: Tensor
    has_copies: bool
    is_local: bool

    @classmethod
    def build(cls, layout: SequenceLayout, rank: int, needed_positions: Sequence[Sequence[Integers]]) -> MoveTable:
        """Computes the table of a rank.

        Args:
            layout: the shards that hold the tokens.
            needed_positions: for each rank and row the global positions of the result, -1 for the fill. A rank's
                result is the concatenation of its rows.
        """
        owners, rows, sizes = Owners.of(layout), len(needed_positions[0]), layout.sizes
        uses = [_uses(owners, layout.length, sizes, by_row) for by_row in needed_positions]
        send, send_counts, receive_counts = list[Integers](), [0] * layout.shards, [0] * layout.shards
        result, received_count = np.empty(0, dtype=np.int64), 0
        for target, (keys, owner, index) in enumerate(uses):
            if target != rank:
                # Each token that `target` needs is sent once, in the order of its key.
                _, first = np.unique(keys[owner == rank], return_index=True)
                send.append(index[owner == rank][first])
                send_counts[target] = len(first)
                continue
            # This rank's result indexes own tokens, then tokens received from each source in the order of their keys,
            # then the fill.
            result = np.where(owner == rank, index, 0)
            for source in range(layout.shards):
                if source != rank:
                    unique, indices = np.unique(keys[owner == source], return_inverse=True)
                    result[owner == source] = rows * sizes[rank] + received_count + indices
                    receive_counts[source] = len(unique)
                    received_count += len(unique)
            result[owner == -1] = rows * sizes[rank] + received_count
        used_keys = np.concatenate([keys[owner >= 0] for keys, owner, _ in uses])
        return cls(
            rows * sizes[rank],
            torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *send])),
            tuple(send_counts),
            tuple(receive_counts),
            torch.from_numpy(result),
            has_copies=len(np.unique(used_keys)) < len(used_keys),
            is_local=all(np.isin(owner, (-1, target)).all() for target, (_, owner, _) in enumerate(uses)),
        )


def start_move(x: Tensor, axis: Axis, table: MoveTable, fill: float = 0) -> Collective[Tensor]:
    """Starts to move tokens [tokens, ...] by the table. The result [len(table.result), ...] is new memory.

    Bytes sent: the tokens of `table.send`, kind "all_to_all"; none if the table is local.
    """
    send, result = _on_device(table, x.device)

    def assemble(arrivals: Tensor) -> Tensor:
        fill_row = x.new_full((1, *x.shape[1:]), fill)
        return torch.cat([x, arrivals.view(-1, *x.shape[1:]), fill_row]).index_select(0, result)

    if table.is_local:
        return Collective(axis, (), (), lambda: assemble(x[:0]))
    sent_tokens = x.index_select(0, send)
    return _start(axis, sent_tokens, table.send_counts, table.receive_counts, assemble)


def start_return(grad: Tensor, axis: Axis, table: MoveTable, fill: float = 0) -> Collective[Tensor]:
    """Starts the transpose of `start_move`: the gradient of each own token is the sum over its uses on all ranks.

    Sums are computed in float32 or wider. Tokens with copies are also sent in that dtype, others in the dtype of
    `grad`.
    """
    send, result = _on_device(table, grad.device)
    # Sum over this rank's uses of each token, then send the sums of received tokens to their owners. A token that is
    # used once has no sum, so it is sent in the narrow dtype.
    wide = accumulation_dtype(grad.dtype) if table.has_copies else grad.dtype
    received_count = sum(table.receive_counts)
    sums = grad.new_zeros((table.tokens + received_count + 1, *grad.shape[1:]), dtype=wide)
    sums.index_add_(0, result, grad.to(wide))
    own_sums, remote_sums = sums[: table.tokens], sums[table.tokens : table.tokens + received_count]

    def assemble(arrivals: Tensor) -> Tensor:
        return own_sums.index_add(0, send, arrivals.view(-1, *grad.shape[1:])).to(grad.dtype)

    if table.is_local:
        return Collective(axis, (), (), lambda: own_sums.to(grad.dtype))
    return _start(axis, remote_sums.contiguous(), table.receive_counts, table.send_counts, assemble)


def _start(
    axis: Axis, values: Tensor, send: Sequence[int], receive: Sequence[int], assemble: AssembleReceived
) -> Collective[Tensor]:
    elements = prod(values.shape[1:])
    exchange = start_parts(axis, values, [n * elements for n in send], [n * elements for n in receive], "all_to_all")
    return Collective(axis, (exchange.send_buffer,), exchange.works, lambda: assemble(exchange.receive_buffer))


def _uses(
    owners: Owners, length: int, sizes: Sequence[int], row_positions: Sequence[Integers]
) -> tuple[Integers, Integers, Integers]:
    """Returns for each token of a rank's result (its key, its owner, its index on the owner).

    A key is row * length + position, or -1 for the fill, whose owner is -1 too.
    """
    keys = np.concatenate(
        [np.where(positions < 0, -1, positions + row * length) for row, positions in enumerate(row_positions)]
    )
    owner, index = owners.find(np.maximum(keys % length, 0))
    row = keys // length
    return keys, np.where(keys < 0, -1, owner), index + row * np.array(sizes)[owner]


@dataclass(frozen=True, eq=False)
class Owners:
    """Lookup of the shard that has a position, and of the position's local index there.

    Args:
        starts: first position of each span with step 1, rising.
        shards: the shard of each span.
        offsets: the local index of each span's first token.
    """

    starts: Integers
    shards: Integers
    offsets: Integers

    @classmethod
    def of(cls, layout: SequenceLayout) -> Owners:
        return _owners(layout)

    def find(self, positions: Integers) -> tuple[Integers, Integers]:
        """Returns (shards, local indices) of global positions."""
        span = np.searchsorted(self.starts, positions, side="right") - 1
        return self.shards[span], self.offsets[span] + positions - self.starts[span]


@lru_cache(maxsize=16)
def _owners(layout: SequenceLayout) -> Owners:
    starts, shards, offsets = list[Integers](), list[Integers](), list[Integers]()
    for shard in range(layout.shards):
        first = 0
        for span in layout.spans(shard):
            # Tokens of a span with a step are not adjacent: each becomes a span of one token.
            span_starts = np.arange(span.start, span.stop, span.step) if span.step > 1 else np.array([span.start])
            starts.append(span_starts)
            shards.append(np.full_like(span_starts, shard))
            offsets.append(first + np.arange(len(span_starts)))
            first += len(span)
    order = np.argsort(np.concatenate(starts))
    return Owners(*(np.concatenate(values)[order] for values in (starts, shards, offsets)))


@lru_cache(maxsize=64)
@compat.outside_modes
def _on_device(table: MoveTable, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the indices of a table on a device, copied there once."""
    return table.send.to(device), table.result.to(device)
