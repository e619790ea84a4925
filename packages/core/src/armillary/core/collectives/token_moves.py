"""Moves of tokens between the ranks of an axis, in one all-to-all. A token may go to any rank, or to several.

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
    """The tokens that one rank sends and receives, and the tokens of its result.

    Tokens are on dim 0: those of batch row 0, then those of row 1, and so on. The fill is a constant token that stands
    for positions that do not exist, such as the one before the first token of a document.

    Args:
        tokens: number of tokens that this rank holds, in all rows.
        send: indices of held tokens to send: those for rank 0, then those for rank 1, and so on.
        send_counts, receive_counts: number of tokens sent to, and received from, each rank.
        result: for each token of the result, its index in the concatenation of held tokens, received tokens, the fill.
        has_copies: True if a token occurs twice, in one rank's result or in those of two ranks, so that its gradient is
            a sum.
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
            layout: the layout of the tokens before the move.
            needed_positions: needed_positions[r][b] are the global positions of the tokens in row b of the result of
                rank r, -1 for the fill. A rank's result is the concatenation of its rows.
        """
        lookup, rows, sizes = Owners.of(layout), len(needed_positions[0]), layout.sizes
        needed_tokens = [_locate(lookup, layout.length, sizes, row_positions) for row_positions in needed_positions]
        held_count = rows * sizes[rank]
        send, send_counts, receive_counts = list[Integers](), [0] * layout.shards, [0] * layout.shards
        result, received_count = np.empty(0, dtype=np.int64), 0
        # Sender and receiver both sort the tokens of a message by key, so its order is known without communication.
        for target, (keys, owners, indices) in enumerate(needed_tokens):
            if target != rank:
                # Send each held token that `target` needs once, even if its result has the token several times.
                _, first = np.unique(keys[owners == rank], return_index=True)
                send.append(indices[owners == rank][first])
                send_counts[target] = len(first)
                continue
            # Indices into the concatenation: held tokens, then the tokens received from each source, then the fill.
            result = np.where(owners == rank, indices, 0)
            for source in range(layout.shards):
                if source != rank:
                    unique_keys, message_indices = np.unique(keys[owners == source], return_inverse=True)
                    result[owners == source] = held_count + received_count + message_indices
                    receive_counts[source] = len(unique_keys)
                    received_count += len(unique_keys)
            result[owners == -1] = held_count + received_count
        used_keys = np.concatenate([keys[owners >= 0] for keys, owners, _ in needed_tokens])
        return cls(
            held_count,
            torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *send])),
            tuple(send_counts),
            tuple(receive_counts),
            torch.from_numpy(result),
            has_copies=len(np.unique(used_keys)) < len(used_keys),
            is_local=all(np.isin(owners, (-1, target)).all() for target, (_, owners, _) in enumerate(needed_tokens)),
        )


def start_move(x: Tensor, axis: Axis, table: MoveTable, fill: float = 0) -> Collective[Tensor]:
    """Starts to move the tokens of `x` [table.tokens, ...]. The result [len(table.result), ...] is new memory.

    Args:
        fill: value of the elements of the fill.

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
    """Starts the transpose of `start_move`: the gradient of each held token is the sum over its uses on all ranks.

    Args:
        grad: gradient of the result of `start_move`: [len(table.result), ...].
        fill: ignored: the fill has no gradient. `linear` passes the same arguments to a collective and to its adjoint.

    Returns:
        The gradient of `x` in `start_move`: [table.tokens, ...]. If a token has copies, gradients are sent and summed
        in float32 or wider.
    """
    send, result = _on_device(table, grad.device)
    # Without copies the sum of a token has at most one addend, so the dtype of `grad` is exact.
    sum_dtype = accumulation_dtype(grad.dtype) if table.has_copies else grad.dtype
    received_count = sum(table.receive_counts)
    # 1. Sum over this rank's uses of each held token, each received token, and the fill, whose gradient is dropped.
    sums = grad.new_zeros((table.tokens + received_count + 1, *grad.shape[1:]), dtype=sum_dtype)
    sums.index_add_(0, result, grad.to(sum_dtype))
    # 2. Return the sums of received tokens to the ranks that hold these tokens, which add them to their own sums.
    held_sums, remote_sums = sums[: table.tokens], sums[table.tokens : table.tokens + received_count]

    def assemble(arrivals: Tensor) -> Tensor:
        return held_sums.index_add(0, send, arrivals.view(-1, *grad.shape[1:])).to(grad.dtype)

    if table.is_local:
        return Collective(axis, (), (), lambda: held_sums.to(grad.dtype))
    return _start(axis, remote_sums.contiguous(), table.receive_counts, table.send_counts, assemble)


def _start(
    axis: Axis, values: Tensor, send: Sequence[int], receive: Sequence[int], assemble: Callable[[Tensor], Tensor]
) -> Collective[Tensor]:
    """Starts an all-to-all of send[w] tokens to rank w. `assemble` makes the result from the flat receive buffer."""
    size = prod(values.shape[1:])  # elements of a token
    exchange = start_parts(axis, values, [n * size for n in send], [n * size for n in receive], "all_to_all")
    return Collective(axis, (exchange.send_buffer,), exchange.works, lambda: assemble(exchange.receive_buffer))


def _locate(
    lookup: Owners, length: int, sizes: Sequence[int], row_positions: Sequence[Integers]
) -> tuple[Integers, Integers, Integers]:
    """Returns (keys, owners, indices) of the tokens of a rank's result.

    A key, row * length + position, identifies a token. Its owner is the rank that holds it, its index the token's place
    among the tokens that the owner holds. The fill has key and owner -1.
    """
    keys = np.concatenate(
        [np.where(positions < 0, -1, positions + row * length) for row, positions in enumerate(row_positions)]
    )
    # The fill is looked up like a token, because -1 % length is a position. Its owner is replaced, its index not used.
    owners, indices = lookup.find(keys % length)
    row = keys // length
    return keys, np.where(keys < 0, -1, owners), indices + row * np.array(sizes)[owners]


@dataclass(frozen=True, eq=False)
class Owners:
    """Lookup of the shard that holds a position, and of the position's local index in that shard.

    Args:
        starts: first position of each run of adjacent positions of one shard, rising.
        shards: the shard of each run.
        offsets: local index of each run's first position.
    """

    starts: Integers
    shards: Integers
    offsets: Integers

    @classmethod
    def of(cls, layout: SequenceLayout) -> Owners:
        return _owners(layout)

    def find(self, positions: Integers) -> tuple[Integers, Integers]:
        """Returns (shard, local index) of each global position."""
        run = np.searchsorted(self.starts, positions, side="right") - 1
        return self.shards[run], self.offsets[run] + positions - self.starts[run]


@lru_cache(maxsize=16)
def _owners(layout: SequenceLayout) -> Owners:
    starts, shards, offsets = list[Integers](), list[Integers](), list[Integers]()
    for shard, spans in enumerate(layout.spans_by_shard):
        first = 0
        for span in spans:
            # Tokens of a span with a step are not adjacent: each becomes a run of one token.
            span_starts = np.arange(span.start, span.stop, span.step) if span.step > 1 else np.array([span.start])
            starts.append(span_starts)
            shards.append(np.full_like(span_starts, shard))
            offsets.append(first + np.arange(len(span_starts)))
            first += len(span)
    order = np.argsort(np.concatenate(starts))
    return Owners(*(np.concatenate(values)[order] for values in (starts, shards, offsets)))


@lru_cache(maxsize=64)  # a copy to the GPU at each call would make the host wait for the GPU
@compat.outside_modes
def _on_device(table: MoveTable, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns `send` and `result` of a table on a device, copied there once."""
    return table.send.to(device), table.result.to(device)
