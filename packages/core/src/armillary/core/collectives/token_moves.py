"""Moving tokens between the ranks of an axis by a table: any tokens to any ranks, copies included, in one all-to-all.

A `MoveTable` is computed on the host from a layout, alike on all ranks, so that no rank asks another for anything. A
token travels once to each rank that needs it, however often that rank uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from armillary.core.accumulate import accumulation_dtype
from armillary.core.collectives.collective import Collective, start_parts
from armillary.core.layout import SequenceLayout
from armillary.core.mesh import Axis
from armillary.core.slices import Integers

AssembleReceived = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class MoveTable:
    """The tokens that one rank sends, receives and returns. Tokens are on dim 0; with rows, row by row.

    Args:
        tokens: this rank's own tokens.
        send: indices of own tokens, for rank 0, rank 1, ...
        send_counts, receive_counts: tokens for and from each rank.
        result: for each token of the result its index among own tokens, received tokens and, last, the fill.
        shared: a token may be used several times, so that its gradient is a sum.
        silent: no rank sends anything.
    """

    tokens: int
    send: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    result: Tensor
    shared: bool
    silent: bool

    @classmethod
    def build(cls, layout: SequenceLayout, rank: int, wanted: Sequence[Sequence[Integers]]) -> MoveTable:
        """Computes the table of a rank.

        Args:
            layout: the shards that hold the tokens.
            wanted: global positions for each rank and row, -1 for the fill; their concatenation is the rank's result.
        """
        owners, rows, sizes = Owners.of(layout), len(wanted[0]), layout.sizes
        uses = [_uses(owners, layout.length, sizes, by_row) for by_row in wanted]
        send, send_counts, receive_counts = list[Integers](), [0] * layout.shards, [0] * layout.shards
        result, received = np.empty(0, dtype=np.int64), 0
        for target, (keys, owner, index) in enumerate(uses):
            if target != rank:
                _, first = np.unique(keys[owner == rank], return_index=True)
                send.append(index[owner == rank][first])
                send_counts[target] = len(first)
                continue
            result = np.where(owner == rank, index, 0)
            for source in range(layout.shards):
                if source != rank:
                    unique, place = np.unique(keys[owner == source], return_inverse=True)
                    result[owner == source] = rows * sizes[rank] + received + place
                    receive_counts[source] = len(unique)
                    received += len(unique)
            result[owner == -1] = rows * sizes[rank] + received
        real = np.concatenate([keys[owner >= 0] for keys, owner, _ in uses])
        return cls(
            rows * sizes[rank],
            torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *send])),
            tuple(send_counts),
            tuple(receive_counts),
            torch.from_numpy(result),
            shared=len(np.unique(real)) < len(real),
            silent=all(np.isin(owner, (-1, target)).all() for target, (_, owner, _) in enumerate(uses)),
        )


def start_move(x: Tensor, axis: Axis, table: MoveTable, fill: float = 0) -> Collective[Tensor]:
    """Starts to move tokens [tokens, ...] as the table says. The result [len(table.result), ...] is new memory.

    Bytes sent: those of `table.send`'s tokens, kind "all_to_all"; nothing where the table is silent.
    """
    send, result = _on_device(table, x.device)

    def assemble(received: Tensor) -> Tensor:
        filling = x.new_full((1, *x.shape[1:]), fill)
        return torch.cat([x, received.view(-1, *x.shape[1:]), filling]).index_select(0, result)

    if table.silent:
        return Collective(axis, (), (), lambda: assemble(x[:0]))
    packed = x.index_select(0, send)
    return _start(axis, packed, table.send_counts, table.receive_counts, assemble)


def start_return(grad: Tensor, axis: Axis, table: MoveTable, fill: float = 0) -> Collective[Tensor]:
    """Starts the transpose of `start_move`: each own token gets the sum over its uses on all ranks, in rank order.

    Sums are float32 or wider; those of tokens with several uses travel so, others in the dtype of `grad`.
    """
    send, result = _on_device(table, grad.device)
    wide = accumulation_dtype(grad.dtype) if table.shared else grad.dtype
    received = sum(table.receive_counts)
    sums = grad.new_zeros((table.tokens + received + 1, *grad.shape[1:]), dtype=wide)
    sums.index_add_(0, result, grad.to(wide))
    own, remote = sums[: table.tokens], sums[table.tokens : table.tokens + received]

    def assemble(returned: Tensor) -> Tensor:
        return own.index_add(0, send, returned.view(-1, *grad.shape[1:])).to(grad.dtype)

    if table.silent:
        return Collective(axis, (), (), lambda: own.to(grad.dtype))
    return _start(axis, remote.contiguous(), table.receive_counts, table.send_counts, assemble)


def _start(
    axis: Axis, packed: Tensor, send: Sequence[int], receive: Sequence[int], assemble: AssembleReceived
) -> Collective[Tensor]:
    each = prod(packed.shape[1:])
    parts = start_parts(axis, packed, [n * each for n in send], [n * each for n in receive], "all_to_all")
    return Collective(axis, (parts.sent,), parts.works, lambda: assemble(parts.buffer))


def _uses(
    owners: Owners, length: int, sizes: Sequence[int], wanted: Sequence[Integers]
) -> tuple[Integers, Integers, Integers]:
    """Returns (a key of the token, its owner or -1, its index on the owner) for each token of a rank's result."""
    keys = np.concatenate(
        [np.where(positions < 0, -1, positions + row * length) for row, positions in enumerate(wanted)]
    )
    owner, index = owners.find(np.maximum(keys % length, 0))
    row = keys // length
    return keys, np.where(keys < 0, -1, owner), index + row * np.array(sizes)[owner]


@dataclass(frozen=True, eq=False)
class Owners:
    """The shard that holds each position, and the position's index there."""

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
            # Tokens of a span with a step are not neighbours: each is a span of its own.
            begins = np.arange(span.start, span.stop, span.step) if span.step > 1 else np.array([span.start])
            starts.append(begins)
            shards.append(np.full_like(begins, shard))
            offsets.append(first + np.arange(len(begins)))
            first += len(span)
    order = np.argsort(np.concatenate(starts))
    return Owners(*(np.concatenate(values)[order] for values in (starts, shards, offsets)))


@lru_cache(maxsize=64)
def _on_device(table: MoveTable, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the indices of a table on a device, copied there once."""
    return table.send.to(device), table.result.to(device)
