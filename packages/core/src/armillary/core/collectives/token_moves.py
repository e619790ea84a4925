"""Moves of tokens between the ranks of an axis: any tokens to any ranks, copies included, in one all-to-all.

Every rank computes its `MoveTable` on the host from the layout, without communication. `start_move` moves tokens by the
table, and `start_return` is its transpose, for gradients. A token is sent once to each rank that needs it, even if that
rank uses it several times.
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


@dataclass(frozen=True, eq=False)
class MoveTable:
    """The tokens that one rank sends and receives, and the tokens of its result. Tokens are on dim 0, row after row.

    Args:
        tokens: number of this rank's own tokens.
        send: indices of own tokens to send: for rank 0, then for rank 1, and so on.
        send_counts, receive_counts: number of tokens sent to and received from each rank.
        result: index of each token of the result in the concatenation of own tokens, received tokens and the fill.
        has_copies: True if a token occurs several times in the results of all ranks, so that its gradient is a sum.
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
            needed_positions: for each rank and row, the global positions of the result's tokens, -1 for the fill. A
                rank's result is the concatenation of its rows.
        """
        lookup, rows, sizes = Owners.of(layout), len(needed_positions[0]), layout.sizes
        needed_tokens = [_locate(lookup, layout.length, sizes, row_positions) for row_positions in needed_positions]
        send, send_counts, receive_counts = list[Integers](), [0] * layout.shards, [0] * layout.shards
        result, received_count = np.empty(0, dtype=np.int64), 0
        # Both sides sort a message by key, so that sender and receiver agree on its order without communication.
        for target, (keys, owners, indices) in enumerate(needed_tokens):
            if target != rank:
                # Send each token that `target` needs from here once, however often its result has it.
                _, first = np.unique(keys[owners == rank], return_index=True)
                send.append(indices[owners == rank][first])
                send_counts[target] = len(first)
                continue
            # This rank's result: indices of own tokens, then of the tokens received from each source, then of the fill.
            result = np.where(owners == rank, indices, 0)
            for source in range(layout.shards):
                if source != rank:
                    unique_keys, message_indices = np.unique(keys[owners == source], return_inverse=True)
                    result[owners == source] = rows * sizes[rank] + received_count + message_indices
                    receive_counts[source] = len(unique_keys)
                    received_count += len(unique_keys)
            result[owners == -1] = rows * sizes[rank] + received_count
        used_keys = np.concatenate([keys[owners >= 0] for keys, owners, _ in needed_tokens])
        return cls(
            rows * sizes[rank],
            torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *send])),
            tuple(send_counts),
            tuple(receive_counts),
            torch.from_numpy(result),
            has_copies=len(np.unique(used_keys)) < len(used_keys),
            is_local=all(np.isin(owners, (-1, target)).all() for target, (_, owners, _) in enumerate(needed_tokens)),
        )


def start_move(x: Tensor, axis: Axis, table: MoveTable, fill: float = 0) -> Collective[Tensor]:
    """Starts to move tokens [tokens, ...] by the table. The result [len(table.result), ...] is new memory.

    Bytes sent: the tokens of `table.send`, kind "all_to_all"; none if `table.is_local`.
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
    # Without copies every sum has one addend, so the narrow dtype is exact.
    sum_dtype = accumulation_dtype(grad.dtype) if table.has_copies else grad.dtype
    received_count = sum(table.receive_counts)
    # Sum over this rank's uses of each token: own tokens, received tokens and the fill, whose gradient is dropped.
    sums = grad.new_zeros((table.tokens + received_count + 1, *grad.shape[1:]), dtype=sum_dtype)
    sums.index_add_(0, result, grad.to(sum_dtype))
    # The sums of received tokens return to their owners, which add them to their own.
    own_sums, remote_sums = sums[: table.tokens], sums[table.tokens : table.tokens + received_count]

    def assemble(arrivals: Tensor) -> Tensor:
        return own_sums.index_add(0, send, arrivals.view(-1, *grad.shape[1:])).to(grad.dtype)

    if table.is_local:
        return Collective(axis, (), (), lambda: own_sums.to(grad.dtype))
    return _start(axis, remote_sums.contiguous(), table.receive_counts, table.send_counts, assemble)


def _start(
    axis: Axis, values: Tensor, send: Sequence[int], receive: Sequence[int], assemble: Callable[[Tensor], Tensor]
) -> Collective[Tensor]:
    """Starts the all-to-all; `assemble` returns the result from the flat buffer of received tokens."""
    size = prod(values.shape[1:])  # elements of a token
    exchange = start_parts(axis, values, [n * size for n in send], [n * size for n in receive], "all_to_all")
    return Collective(axis, (exchange.send_buffer,), exchange.works, lambda: assemble(exchange.receive_buffer))


def _locate(
    lookup: Owners, length: int, sizes: Sequence[int], row_positions: Sequence[Integers]
) -> tuple[Integers, Integers, Integers]:
    """Returns (keys, owners, indices) of the tokens of a rank's result; indices are local to the owners.

    A key is row * length + position. The fill has key and owner -1.
    """
    keys = np.concatenate(
        [np.where(positions < 0, -1, positions + row * length) for row, positions in enumerate(row_positions)]
    )
    # The fill is looked up like a token: -1 % length is a position, and its owner and index are replaced or unused.
    owners, indices = lookup.find(keys % length)
    row = keys // length
    return keys, np.where(keys < 0, -1, owners), indices + row * np.array(sizes)[owners]


@dataclass(frozen=True, eq=False)
class Owners:
    """Lookup of the shard that holds a position, and of its local index there.

    Args:
        starts: first position of each run of adjacent positions, rising.
        shards: the shard of each run.
        offsets: the local index of each run's first token.
    """

    starts: Integers
    shards: Integers
    offsets: Integers

    @classmethod
    def of(cls, layout: SequenceLayout) -> Owners:
        return _owners(layout)

    def find(self, positions: Integers) -> tuple[Integers, Integers]:
        """Returns (shards, local indices) of global positions."""
        run = np.searchsorted(self.starts, positions, side="right") - 1
        return self.shards[run], self.offsets[run] + positions - self.starts[run]


@lru_cache(maxsize=16)
def _owners(layout: SequenceLayout) -> Owners:
    starts, shards, offsets = list[Integers](), list[Integers](), list[Integers]()
    for shard in range(layout.shards):
        first = 0
        for span in layout.spans(shard):
            # Tokens of a span with a step are not adjacent: each becomes a run of one token.
            span_starts = np.arange(span.start, span.stop, span.step) if span.step > 1 else np.array([span.start])
            starts.append(span_starts)
            shards.append(np.full_like(span_starts, shard))
            offsets.append(first + np.arange(len(span_starts)))
            first += len(span)
    order = np.argsort(np.concatenate(starts))
    return Owners(*(np.concatenate(values)[order] for values in (starts, shards, offsets)))


@lru_cache(maxsize=64)  # a copy for each call would synchronize the host with the GPU
@compat.outside_modes
def _on_device(table: MoveTable, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the indices of a table on a device, copied there once."""
    return table.send.to(device), table.result.to(device)
