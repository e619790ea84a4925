"""Point-to-point messages between the ranks of one axis, in flight while the caller computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.core import compat
from armillary.core.mesh import Axis
from armillary.core.spans import TokenRanges
from armillary.core.trace import NO_SPAN, Trace, end_span_on_wait, record, span

ALIGNMENT = 16
"""Alignment in bytes that CUDA kernels need at the start of a row."""


class FlatBuffer(NamedTuple):
    """Tensors that are sent as one message, without gaps in one contiguous buffer."""

    buffer: Tensor
    """A single tensor itself; several tensors of one shape and dtype stacked; otherwise their bytes."""
    views: tuple[Tensor, ...] = ()
    """The tensors as views of `buffer`; empty if `buffer` has them stacked."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors as views of `buffer`."""
        return self.views or self.buffer.unbind(0)

    @property
    def tokens(self) -> int:
        """The size of dim 1 of each tensor."""
        return self.views[0].shape[1] if self.views else self.buffer.shape[2]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], tokens: TokenRanges | None = None) -> FlatBuffer:
        """Returns a buffer with copies of `tensors`; a single contiguous tensor is not copied.

        Args:
            tensors: tensors on one device.
            tokens: the tokens on dim 1 to copy; None for all.
        """
        # Autograd does not follow messages: attention methods have a backward that sends the gradients.
        values = [x.detach() if x.requires_grad else x for x in tensors]
        if tokens is not None:
            # Several runs are copied directly into the buffer. A single run is a view, which is copied further below.
            if len(tokens.runs) > 1:
                flat = cls.like(values, tokens.count)
                for target, x in zip(flat.tensors, values, strict=True):
                    tokens.take(x, out=target)
                return flat
            values = [tokens.take(x) for x in values]
        if len(values) == 1:
            tensor = values[0].contiguous()
            return cls(tensor, (tensor,))
        if _same_shape_and_dtype(values):
            return cls(torch.stack(values).contiguous())  # stack keeps the strides of transposed tensors
        flat = cls._of_bytes(values)
        for target, x in zip(flat.views, values, strict=True):
            target.copy_(x)
        return flat

    @classmethod
    def like(cls, tensors: Sequence[Tensor], tokens: int | None = None, memory: Tensor | None = None) -> FlatBuffer:
        """Returns an uninitialized buffer for tensors like these, with `tokens` on dim 1 if given.

        Args:
            memory: a uint8 tensor, at least as large as the buffer, whose first bytes become the buffer. By default
                new memory is allocated.
        """
        if not _same_shape_and_dtype(tensors):
            return cls._of_bytes(tensors, tokens, memory)
        first = tensors[0]
        shape = first.shape if tokens is None else (first.shape[0], tokens, *first.shape[2:])
        shape = shape if len(tensors) == 1 else (len(tensors), *shape)  # several tensors are stacked
        if memory is None:
            buffer = first.new_empty(shape)
        else:
            buffer = memory[: prod(shape) * first.element_size()].view(first.dtype).view(shape)
        return cls(buffer, (buffer,) if len(tensors) == 1 else ())

    def part(self, tokens: TokenRanges) -> FlatBuffer:
        """Returns a buffer with some tokens on dim 1 of each tensor; this buffer itself for all tokens."""
        if tokens.count == self.tokens:
            return self
        if self.views or len(tokens.runs) != 1:
            return FlatBuffer.of(self.tensors, tokens)
        # One run of stacked tensors: one copy for all of them.
        (run,) = tokens.runs
        return FlatBuffer(self.buffer.narrow(2, run.start, len(run)).contiguous())

    @classmethod
    def _of_bytes(
        cls, tensors: Sequence[Tensor], tokens: int | None = None, memory: Tensor | None = None
    ) -> FlatBuffer:
        shapes = [x.shape if tokens is None else (x.shape[0], tokens, *x.shape[2:]) for x in tensors]
        sizes = [prod(shape) * x.element_size() for shape, x in zip(shapes, tensors, strict=True)]
        if memory is None:
            memory = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
        buffer = memory[: sum(sizes)]
        views, offset = dict[int, Tensor](), 0
        for i in _byte_order(tuple(sizes), tuple([x.element_size() for x in tensors])):
            views[i] = buffer[offset : offset + sizes[i]].view(tensors[i].dtype).view(shapes[i])
            offset += sizes[i]
        return cls(buffer, tuple(views[i] for i in range(len(sizes))))


class ReceiveMemory(NamedTuple):
    # A block of memory, as uint8, and the newest buffer in it.
    memory: Tensor
    buffer: FlatBuffer


class ReceiveBuffers:
    """Receive buffers for the steps of a repeated exchange, in at most two blocks of memory.

    Args:
        tensors: tensors with the shapes and dtypes of those that arrive, except for the size of dim 1.
        tokens: number of tokens, the size of dim 1, that arrive at each step.
    """

    # If each step allocated a new buffer, memory would grow while the host runs ahead of the GPU: up to torch 2.14,
    # ProcessGroupNCCL calls `record_stream` on sent and received tensors, and the allocator reuses their memory only
    # after the host has seen that the GPU no longer needs them.

    def __init__(self, tensors: Sequence[Tensor], tokens: Sequence[int]) -> None:
        self.tensors: Sequence[Tensor] = tensors
        self.tokens: list[int] = list(tokens)
        # The block of the last step, and the other one.
        self._last: ReceiveMemory | None = None
        self._other: ReceiveMemory | None = None

    def take(self, last_in_use: bool) -> FlatBuffer | None:
        """Returns an uninitialized buffer for the tokens of the next step; None if no tokens arrive.

        Args:
            last_in_use: True if the buffer of the last call is still needed: the new buffer then takes the other block
                of memory. Otherwise it takes the same block.
        """
        # Double buffering: steps alternate between the blocks while the last buffer is in use, otherwise stay on one.
        count, *self.tokens = self.tokens
        if not count:
            return None
        block, other = (self._other, self._last) if last_in_use else (self._last, self._other)
        if block is None:
            # Large enough for this and every later step, so that a block is never reallocated.
            token_bytes = sum(x.element_size() * x.shape[0] * prod(x.shape[2:]) for x in self.tensors)
            size = token_bytes * max(count, *self.tokens, 0)
            memory = torch.empty(size, dtype=torch.uint8, device=self.tensors[0].device)
            block = ReceiveMemory(memory, FlatBuffer.like(self.tensors, count, memory))
        elif block.buffer.tokens != count:
            block = ReceiveMemory(block.memory, FlatBuffer.like(self.tensors, count, block.memory))
        # At the last step this object drops its blocks, so that they are freed with the caller's buffers.
        self._last, self._other = (block, other) if any(self.tokens) else (None, None)
        return block.buffer


@lru_cache(maxsize=256)
def _byte_order(sizes: tuple[int, ...], element_sizes: tuple[int, ...]) -> list[int]:
    # Tensors whose size is a multiple of the alignment come first, and so begin at aligned addresses. Wide dtypes come
    # before narrow ones, so that every tensor begins at a multiple of its element size.
    return sorted(range(len(sizes)), key=lambda i: (sizes[i] % ALIGNMENT > 0, -element_sizes[i]))


def _same_shape_and_dtype(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    return all(x.shape == first.shape and x.dtype == first.dtype for x in tensors[1:])


FlatBuffers = Mapping[int, FlatBuffer]
"""Buffers by the rank on the axis to which they are sent, or from which they are received."""


class Exchange(NamedTuple):
    """Messages in flight. Holds references to their buffers, so callers keep it until `wait` has returned."""

    axis: Axis
    send_buffers: FlatBuffers
    receive_buffers: FlatBuffers
    works: tuple[dist.Work, ...]

    def wait(self) -> None:
        """Waits until all messages have been sent and received. On CUDA the current stream waits, not the host.

        Raises:
            TimeoutError: the axis' time-out passed.
            ConnectionError: a peer has closed its connection or is gone. Both name the global ranks of all peers.
            torch.AcceleratorError: an earlier kernel of this rank failed.
            RuntimeError: any other error of the backend, unchanged.
        """
        finish(self.works, self.axis, lambda: describe_messages(self.axis, self.send_buffers, self.receive_buffers))


def describe_messages(axis: Axis, send: FlatBuffers, receive: FlatBuffers) -> str:
    ranks = axis.ranks()
    sources, targets = ([ranks[peer] for peer in peers] for peers in (receive, send))
    return f"to receive from {sources} and send to {targets}"


def start_exchange(axis: Axis, send: FlatBuffers, receive: FlatBuffers) -> Exchange:
    """Starts sends and receives along an axis, one message for each buffer, and returns at once.

    Messages arrive in separate buffers, so kernels may read the sent buffers meanwhile (double buffering). All ranks
    must start their exchanges on an axis in the same order. A rank without messages may skip an exchange, but only
    after a collective has connected all ranks of the group; `Axis.duplicate` runs one on the axis and on its duplicate.

    Args:
        send: buffers by receiving rank. Must not be written to before `wait`.
        receive: buffers by sending rank, in the shape and dtype of that rank's `send`. Must not be used before `wait`.

    Bytes sent: the buffers of `send`, kind "p2p".

    Raises:
        ValueError: a peer is this rank itself, or not a rank of the axis.
        ConnectionError: as `Exchange.wait`, if the connection is closed already.
    """
    for peer in (*send, *receive):
        if peer == axis.rank or not 0 <= peer < axis.size:
            raise ValueError(f"rank {axis.rank} of axis {axis.name!r} cannot exchange with {peer} of {axis.size} ranks")
    send_tensors = {peer: flat.buffer for peer, flat in send.items()}
    receive_tensors = {peer: flat.buffer for peer, flat in receive.items()}
    trace_span = record(axis.name, "p2p", sum([x.nbytes for x in send_tensors.values()]), len(send_tensors))
    try:
        works = compat.start_batch(axis.group, receive_tensors, send_tensors)
    except RuntimeError as error:
        raise_peer_error(error, axis, describe_messages(axis, send, receive))
        raise
    return Exchange(axis, send, receive, tuple(works) if trace_span is None else end_span_on_wait(works, trace_span))


TIMED_OUT = re.compile(r"timed?[ -]?out", re.IGNORECASE)
"""Matches the error messages of gloo, NCCL and torch for a time-out."""

LOST_PEER = re.compile(r"connect|peer|broken pipe|socket|remote process|abort", re.IGNORECASE)
"""Matches the error messages of gloo, NCCL and torch for a lost peer."""


def finish(works: Sequence[dist.Work], axis: Axis, describe: Callable[[], str]) -> None:
    """Waits for all of `works`. Errors are those of `Exchange.wait`, with `describe` for the operations."""
    if not works:
        return
    try:
        with NO_SPAN if Trace.current is None else span(f"wait {axis.name}", "wait"):
            for work in works:
                work.wait() if axis.timeout is None else work.wait(axis.timeout)
    except RuntimeError as error:
        raise_peer_error(error, axis, describe())
        raise


def raise_peer_error(error: RuntimeError, axis: Axis, operations: str) -> None:
    """Raises the error of `finish` if the cause of a communication error is a lost or late peer, or a failed kernel."""
    if isinstance(error, torch.AcceleratorError):
        return  # CUDA reports an earlier kernel's error at the next call
    # NCCL may report a failed kernel of this rank as a communication error; the message below would blame a peer.
    if axis.device != "cpu" and (kernel_error := compat.device_error()) is not None:
        raise kernel_error from error
    rank, reason = axis.ranks()[axis.rank], str(error).partition("\n")[0]
    if TIMED_OUT.search(str(error)):
        raise TimeoutError(f"rank {rank} timed out on axis {axis.name!r}, waiting {operations}: {reason}") from error
    if LOST_PEER.search(str(error)):
        lost = f"rank {rank} lost a peer on axis {axis.name!r}, which is gone or has closed its connection"
        raise ConnectionError(f"{lost}, waiting {operations}: {reason}") from error
