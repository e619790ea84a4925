"""Moves of tokens between the ranks of an axis: which tokens each rank sends, computed on the host, and their exchange.

relayout_move, shift_move, halo_move    `TokenMove`s of the functions in `token_moves`, with cached tables
MoveTable, Owners                       how a table follows from the positions that each rank needs
start_move, start_return                the exchange, in one all-to-all, and its transpose, for gradients
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from armillary.core import compat
from armillary.core.argument_checks import check_dim, check_tensor
from armillary.core.collectives.collective import Collective, accumulation_dtype, start_parts
from armillary.core.graph_ops import TracedAxis
from armillary.core.layout import SequenceLayout
from armillary.core.mesh import Axis
from armillary.core.slices import Integers, Segmented, Segments, check_lookahead, segments_of

FLAT = -1
"""Given as the dim of tokens: the tokens of several rows are flattened into dim 0, row by row."""


class TokenMove(NamedTuple):
    """A move of tokens between ranks: one for all rows of a tensor, or a different one for each row.

    Args:
        rows: number of rows with different moves; 1 if all rows move alike.
        lengths: number of tokens of each run with its halo; only for `halo`.
        fill: value of the tokens that do not exist.
    """

    axis: Axis
    table: MoveTable
    rows: int = 1
    lengths: Sequence[int] = ()
    fill: float = 0

    def tokens(self, x: Tensor, dim: int) -> Tensor:
        """Returns `x` with the tokens of `dim` on dim 0, row by row. Raises ValueError if their number does not fit."""
        if self.rows > 1 and dim != FLAT and (dim != 1 or len(x) != self.rows):
            raise ValueError(
                f"x {tuple(x.shape)}: segments of {self.rows} rows need {self.rows} rows on dim 0, and tokens on dim 1"
            )
        tokens = self.flat(x, dim)
        if len(tokens) != self.table.tokens:
            raise ValueError(
                f"x {tuple(x.shape)}: the shard has {self.table.tokens // self.rows} tokens in each of {self.rows} rows"
            )
        return tokens

    def flat(self, x: Tensor, dim: int) -> Tensor:
        # `tokens` without its check; `by_row` is the inverse.
        if dim == FLAT:
            return x
        return x.movedim(dim, 0) if self.rows == 1 else x.flatten(0, 1)

    def by_row(self, tokens: Tensor, dim: int) -> Tensor:
        if dim == FLAT:
            return tokens
        return tokens.movedim(0, dim) if self.rows == 1 else tokens.unflatten(0, (self.rows, -1))


def relayout_move(axis: Axis, source: SequenceLayout, target: SequenceLayout) -> TokenMove:
    return TokenMove(axis, relayout_table(source, target, axis.rank))


def shift_move(
    axis: Axis, layout: SequenceLayout, documents: object, mask: Segmented | None, offset: int, fill: float
) -> TokenMove:
    rows = segments_of(layout.length, documents, mask)
    check_shards(layout, axis)
    check_lookahead("offset", offset, rows)
    return TokenMove(axis, shift_table(layout, rows, offset, axis.rank), len(rows), fill=fill)


def halo_move(
    axis: Axis, layout: SequenceLayout, documents: object, mask: Segmented | None, left: int, right: int
) -> TokenMove:
    rows = segments_of(layout.length, documents, mask)
    check_shards(layout, axis)
    check_lookahead("right", -right, rows)
    table, lengths = halo_table(layout, rows, left, right, axis.rank)
    return TokenMove(axis, table, len(rows), lengths)


def check_shards(layout: SequenceLayout, axis: Axis | TracedAxis) -> None:
    if layout.shards != axis.size:
        raise ValueError(f"the layout has {layout.shards} shards; axis {axis.name!r} has {axis.size} ranks")


def tokens_dim(x: Tensor, dim: int) -> int:
    check_tensor("x", x)
    return check_dim("x", x, dim)


# -- tables: every layer and step looks one up, for few distinct layouts and documents --------------------------------


@lru_cache(maxsize=32)
@compat.outside_modes
def relayout_table(source: SequenceLayout, target: SequenceLayout, rank: int) -> MoveTable:
    # A rank needs the positions of its shard of `target`.
    return MoveTable.build(source, rank, [[target.positions(shard).numpy()] for shard in range(target.shards)])


@lru_cache(maxsize=32)
@compat.outside_modes
def shift_table(layout: SequenceLayout, rows: tuple[Segments, ...], offset: int, rank: int) -> MoveTable:
    # For each token of its shard a rank needs the token `offset` positions before, on its path.
    positions = [layout.positions(shard).numpy() for shard in range(layout.shards)]
    return MoveTable.build(
        layout, rank, [[row.ancestors(shard_positions, offset) for row in rows] for shard_positions in positions]
    )


@lru_cache(maxsize=32)
@compat.outside_modes
def halo_table(
    layout: SequenceLayout, rows: tuple[Segments, ...], left: int, right: int, rank: int
) -> tuple[MoveTable, list[int]]:
    """Returns the moves of `halo`, and the lengths of this rank's runs with their halos, row by row."""
    # The runs of all ranks, because each rank must know which of its tokens other ranks need.
    runs = [[row.runs(spans) for row in rows] for spans in layout.spans_by_shard]
    needed_positions = [
        [
            np.concatenate([_surroundings(row, run, left, right) for run in row_runs])
            for row, row_runs in zip(rows, shard_runs, strict=True)
        ]
        for shard_runs in runs
    ]
    lengths = [left + len(run) + right for row_runs in runs[rank] for run in row_runs]
    return MoveTable.build(layout, rank, needed_positions), lengths


def _surroundings(segments: Segments, run: range, left: int, right: int) -> Integers:
    """Returns the positions of a run and its halo; -1 for halo tokens outside of its document or path."""
    tokens = np.arange(run.start, run.stop, run.step)
    # The token `distance` before the first token of the run, or after its last token; -1 if there is none.
    before = [segments.ancestors(tokens[:1], distance) for distance in range(left, 0, -1)]
    after = [segments.ancestors(tokens[-1:], -distance) for distance in range(1, right + 1)]
    return np.concatenate([*before, tokens, *after])


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
            needed_positions: by rank and row, the global positions of the tokens in its result; -1 for the fill.
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


def _locate(
    lookup: Owners, length: int, sizes: Sequence[int], row_positions: Sequence[Integers]
) -> tuple[Integers, Integers, Integers]:
    """Returns (keys, owners, indices) of the tokens of a rank's result."""
    # A key, row * length + position, identifies a token. Its owner is the rank that holds it, its index the token's
    # place among the tokens that the owner holds. The fill has key and owner -1.
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
    @lru_cache(maxsize=16)
    def of(cls, layout: SequenceLayout) -> Owners:
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
        return cls(*(np.concatenate(values)[order] for values in (starts, shards, offsets)))

    def find(self, positions: Integers) -> tuple[Integers, Integers]:
        run = np.searchsorted(self.starts, positions, side="right") - 1
        return self.shards[run], self.offsets[run] + positions - self.starts[run]


# -- exchange ---------------------------------------------------------------------------------------------------------


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
    """Starts the transpose of `start_move`: [len(table.result), ...] -> [table.tokens, ...].

    The gradient of a held token is the sum over its uses on all ranks. If a token has copies, gradients are sent and
    summed in float32 or wider.
    """
    # `fill` has no gradient: `linear` passes the same arguments to a collective and to its adjoint.
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
    size = prod(values.shape[1:])  # elements of a token
    send_sizes, receive_sizes = [n * size for n in send], [n * size for n in receive]
    send_buffer, buffer, works = start_parts(axis, values, send_sizes, receive_sizes, "all_to_all")
    return Collective(axis, (send_buffer,), works, lambda: assemble(buffer))


@lru_cache(maxsize=64)  # a copy to the GPU at each call would make the host wait for the GPU
@compat.outside_modes
def _on_device(table: MoveTable, device: torch.device) -> tuple[Tensor, Tensor]:
    return table.send.to(device), table.result.to(device)
