"""Sending tensors from rank to rank along one axis, while something else is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.core import compat
from armillary.core.mesh import Axis
from armillary.core.observe.trace import IDLE, Trace, record, span, watched
from armillary.core.token_ranges import TokenRanges

ALIGNED = 16
"""Bytes: kernels on CUDA read rows that begin at multiples of it."""


class FlatBuffer(NamedTuple):
    """Tensors that travel as one message: contiguous views of one buffer, without gaps.

    Args:
        buffer: tensors of one shape and dtype, stacked; or for others a flat one of bytes.
        views: the tensors, where they are not stacked.
    """

    buffer: Tensor
    views: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.views or self.buffer.unbind(0)

    @property
    def tokens(self) -> int:
        """On dim 1 of each tensor."""
        return self.views[0].shape[1] if self.views else self.buffer.shape[2]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], tokens: TokenRanges | None = None) -> FlatBuffer:
        """A buffer with these values: copies, but for a contiguous tensor on its own.

        Args:
            tokens: those on dim 1 that are wanted; None: all.
        """
        values = [x.detach() if x.requires_grad else x for x in tensors]
        if tokens is not None:
            if len(tokens.runs) > 1:
                flat = cls.like(values, tokens.count)
                for into, x in zip(flat.tensors, values, strict=True):
                    tokens.take(x, out=into)
                return flat
            values = [tokens.take(x) for x in values]
        if len(values) == 1:
            alone = values[0].contiguous()
            return cls(alone, (alone,))
        if _alike(values):
            return cls(torch.stack(values).contiguous())  # stack takes over strides that all have
        flat = cls._of_bytes(values, None)
        for into, x in zip(flat.views, values, strict=True):
            into.copy_(x)
        return flat

    @classmethod
    def like(cls, tensors: Sequence[Tensor], tokens: int | None = None, memory: Tensor | None = None) -> FlatBuffer:
        """An empty buffer for tensors like these, on one device; with `tokens`, so many of them on dim 1.

        Args:
            memory: bytes that it begins in, at least as many as it has; by default it has memory of its own.
        """
        if not _alike(tensors):
            return cls._of_bytes(tensors, tokens, memory)
        first = tensors[0]
        shape = first.shape if tokens is None else (first.shape[0], tokens, *first.shape[2:])
        shape = shape if len(tensors) == 1 else (len(tensors), *shape)
        if memory is None:
            buffer = first.new_empty(shape)
        else:
            buffer = memory[: prod(shape) * first.element_size()].view(first.dtype).view(shape)
        return cls(buffer, (buffer,) if len(tensors) == 1 else ())

    @staticmethod
    def nbytes(tensors: Sequence[Tensor], tokens: int) -> int:
        """Bytes of a buffer for tensors like these, with so many tokens on dim 1."""
        return sum(x.element_size() * x.shape[0] * tokens * prod(x.shape[2:]) for x in tensors)

    def part(self, tokens: TokenRanges) -> FlatBuffer:
        """A buffer with some tokens of each tensor, on their dim 1: itself where they are all that it has."""
        if tokens.count == self.tokens:
            return self
        if self.views or len(tokens.runs) != 1:
            return FlatBuffer.of(self.tensors, tokens)
        (run,) = tokens.runs
        return FlatBuffer(self.buffer.narrow(2, run.start, len(run)).contiguous())

    @classmethod
    def _of_bytes(cls, tensors: Sequence[Tensor], tokens: int | None, memory: Tensor | None = None) -> FlatBuffer:
        shapes = [x.shape if tokens is None else (x.shape[0], tokens, *x.shape[2:]) for x in tensors]
        sizes = [prod(shape) * x.element_size() for shape, x in zip(shapes, tensors, strict=True)]
        if memory is None:
            memory = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
        buffer = memory[: sum(sizes)]
        views, at = dict[int, Tensor](), 0
        # Wide elements first, so that each tensor begins at a multiple of its element size; and what would push those
        # after it off the alignment, last.
        for i in sorted(range(len(sizes)), key=lambda i: (sizes[i] % ALIGNED > 0, -tensors[i].element_size())):
            views[i] = buffer[at : at + sizes[i]].view(tensors[i].dtype).view(shapes[i])
            at += sizes[i]
        return cls(buffer, tuple(views[i] for i in range(len(sizes))))


class ReceiveBuffers:
    """Buffers for the steps of a repeated exchange, in at most two blocks of memory, which are used again.

    New memory for each step would add up where the host runs ahead: with NCCL's backend of torch up to 2.14, the
    allocator reuses a block that was sent or received only once the host has seen that the GPU is done with it
    (`record_stream`).

    Args:
        tensors: what arrives is like these.
        tokens: that arrive at each step, on dim 1.
    """

    def __init__(self, tensors: Sequence[Tensor], tokens: Sequence[int]) -> None:
        self.tensors, self.tokens = tensors, list(tokens)
        self._last: Tensor | None = None
        self._other: Tensor | None = None

    def take(self, last_in_use: bool) -> FlatBuffer | None:
        """Returns an empty buffer for the next step's tokens; None where there are none.

        It overwrites the last buffer's block, or the block of the one before that.

        Args:
            last_in_use: the last buffer is still to be read or sent.
        """
        count, *self.tokens = self.tokens
        if not count:
            return None
        block, other = (self._other, self._last) if last_in_use else (self._last, self._other)
        if block is None:
            size = FlatBuffer.nbytes(self.tensors, max(count, *self.tokens, 0))
            block = torch.empty(size, dtype=torch.uint8, device=self.tensors[0].device)
        # After the last step a block lives as long as the buffer in it.
        self._last, self._other = (block, other) if any(self.tokens) else (None, None)
        return FlatBuffer.like(self.tensors, count, block)


def _alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all have one shape and dtype."""
    first = tensors[0]
    return all(x.shape == first.shape and x.dtype == first.dtype for x in tensors[1:])


FlatBuffers = Mapping[int, FlatBuffer]
"""By the rank of the axis that they go to, or come from."""


class Exchange(NamedTuple):
    """Tensors under way. Hold it until `wait` has returned: it keeps the buffers alive."""

    axis: Axis
    sent: FlatBuffers
    received: FlatBuffers
    works: tuple[dist.Work, ...]

    def wait(self) -> None:
        """Returns when all has arrived and left. On CUDA the current stream waits, not the host.

        Raises:
            TimeoutError: the axis' timeout passed, or a neighbour is gone; names the ranks that were waited for.
        """
        finish(self.works, self.axis, self._waiting)

    def _waiting(self) -> str:
        """For whom it waits, as ranks of the world."""
        ranks = self.axis.ranks()
        sources, targets = ([ranks[peer] for peer in peers] for peers in (self.received, self.sent))
        return f"to receive from {sources} and send to {targets}"


def start_exchange(axis: Axis, send: FlatBuffers, receive: FlatBuffers) -> Exchange:
    """Starts sending and receiving along an axis, one message for each buffer; returns at once.

    What arrives goes to buffers of its own, so that computation may go on reading what is sent: double buffering. All
    ranks must start their exchanges on an axis in the same order; some may have nothing to send or to receive, once
    the group has been used by all of its ranks together (`Axis.duplicate` sees to it for the axis and its duplicate).

    Args:
        send: by receiving rank. Kept alive until `wait`; must not be written to before.
        receive: by sending rank, to be filled: shaped as what is sent. Must not be touched before `wait`.

    Bytes sent: those of `send`, kind "p2p".

    Raises:
        ValueError: a rank that would send to or receive from itself, or a peer that is not on the axis.
    """
    for peer in (*send, *receive):
        if peer == axis.rank or not 0 <= peer < axis.size:
            raise ValueError(f"rank {axis.rank} of axis {axis.name!r} cannot exchange with {peer} of {axis.size} ranks")
    sent = {peer: flat.buffer for peer, flat in send.items()}
    under_way = record(axis.name, "p2p", sum([x.nbytes for x in sent.values()]), len(sent))
    works = compat.start_batch(axis.group, {peer: flat.buffer for peer, flat in receive.items()}, sent)
    return Exchange(axis, send, receive, tuple(works) if under_way is None else watched(works, under_way))


def finish(works: Sequence[dist.Work], axis: Axis, waiting: Callable[[], str]) -> None:
    """Waits for all of `works`; a timeout or a lost peer becomes a `TimeoutError` that says `waiting()` for whom."""
    if not works:
        return
    try:
        with IDLE if Trace.current is None else span(f"wait {axis.name}", "wait"):
            for work in works:
                work.wait() if axis.timeout is None else work.wait(axis.timeout)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise TimeoutError(
            f"rank {axis.ranks()[axis.rank]} waited in vain on axis {axis.name!r} {waiting()}: {reason}"
        ) from error
