"""Collectives on one axis that return while they are in flight: on local tensors, without a gradient.

    start_all_gather       [B, T, ...] -> [B, N, ...]          the tokens of all ranks
    start_reduce_scatter   [B, N, ...] -> [B, T, ...]          its transpose: this rank's tokens, summed over ranks
    start_scatter_parts    [B, N, ...] -> C times [B, T, ...]  this rank's tokens from each rank, without the sum
    start_all_reduce       [...] -> [...]                      the sum over ranks
    start_seq_to_head      [B, T, H, D] -> [B, N, h, D]        this rank's heads of all tokens
    start_head_to_seq      [B, N, h, D] -> [B, T, H, D]        its transpose: all heads of this rank's tokens

Each returns a `Collective`, whose `wait` returns the result; `linear` waits, and gives the result a gradient. The
exchange of tokens for heads is that of DeepSpeed-Ulysses (arXiv 2309.14509, section 3). Ranges of heads may have
different sizes, and overlap: if there are fewer key/value heads than ranks, several ranks get the same head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.core import compat
from armillary.core.argument_checks import check_tensor, integer
from armillary.core.collectives.exchange import finish
from armillary.core.ledger import phase
from armillary.core.mesh import Axis
from armillary.core.trace import end_span_on_wait, record

R = TypeVar("R")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to accumulate results of `dtype` in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Collective(Generic[R]):
    """A collective in flight, whose `wait` returns the result. Callers must keep it until then.

    Args:
        buffers: tensors that are sent or received, referenced here so that their memory is not reused before `wait`.
            `assemble` may refer to the received ones instead.
        works: works of torch.distributed to wait for; none on an axis of one rank.
        assemble: returns the result from the received tensors, after all works are complete.
    """

    axis: Axis
    buffers: tuple[Tensor, ...]
    works: tuple[dist.Work, ...]
    assemble: Callable[[], R]

    def wait(self) -> R:
        """Returns the result. On CUDA the current stream waits, not the host.

        Raises:
            TimeoutError, ConnectionError, torch.AcceleratorError, RuntimeError: as `Exchange.wait`.
        """
        if self.works:
            finish(self.works, self.axis, lambda: f"for all of its ranks {self.axis.ranks()}")
        return self.assemble()


# -- gathers, scatters and sums of tokens -----------------------------------------------------------------------------


def start_all_gather(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int = 1) -> Collective[Tensor]:
    """Starts to gather the tokens of all ranks, in rank order: [B, T, ...] -> [B, sum(sizes), ...].

    Args:
        x: local tensor; its size on `dim` is `sizes[axis.rank]`. Must not be written to before `wait`.
        axis: the axis to gather over, of C ranks.
        sizes: tokens of each rank. Every rank sends max(sizes) tokens; ranks with fewer tokens pad them.

    Bytes sent: (C - 1) times the bytes of `x` padded to max(sizes), kind "all_gather".
    """
    check_tokens("x", x, dim, sizes[axis.rank], sizes)
    if axis.size == 1:
        return Collective(axis, (x,), (), lambda: x)
    shape = [*x.shape[:dim], max(sizes), *x.shape[dim + 1 :]]
    if x.shape[dim] == max(sizes):
        send_buffer = x.contiguous()
    else:  # pads with uninitialized values, which `assemble` drops
        send_buffer = x.new_empty(shape)
        send_buffer.narrow(dim, 0, x.shape[dim]).copy_(x)
    buffer = x.new_empty((axis.size, *shape))
    trace_record = record(axis.name, "all_gather", (axis.size - 1) * send_buffer.nbytes, axis.size - 1)
    work = compat.all_gather_single(buffer.view(-1), send_buffer.view(-1), axis.group)

    def assemble() -> Tensor:
        # If all dims before the tokens have size 1, and no rank has padding, the buffer is the result already.
        if prod(shape[:dim]) == 1 and min(sizes) == max(sizes):
            return buffer.view(*shape[:dim], sum(sizes), *shape[dim + 1 :])
        return torch.cat([shard.narrow(dim, 0, size) for shard, size in zip(buffer, sizes, strict=True)], dim)

    return Collective(axis, (send_buffer, buffer), end_span_on_wait([work], trace_record), assemble)


def start_reduce_scatter(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int = 1) -> Collective[Tensor]:
    """Starts to sum over all ranks: [B, sum(sizes), ...] on every rank -> [B, T, ...], the sums of this rank's tokens.

    The transpose of `start_all_gather`, with its arguments. Adds in rank order, in float32 or wider, and rounds once to
    the dtype of `x`: every run has the same bits.

    Bytes sent: the other ranks' tokens in `x`, kind "reduce_scatter".
    """
    check_tokens("x", x, dim, sum(sizes), sizes)
    send_buffer, addends, works = start_scatter(x, axis, sizes, dim)

    def assemble() -> Tensor:
        if axis.size == 1:
            return x
        total = addends[0].to(accumulation_dtype(x.dtype), copy=True)
        # Not one `sum(0)`: from five ranks on, torch's order of addition depends on the shape and on the element's
        # index, so that the bits of a token would depend on the length of its shard.
        for addend in addends[1:]:
            total += addend
        return total.to(x.dtype)

    return Collective(axis, (send_buffer, *addends), works, assemble)


def start_scatter_parts(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int = 1) -> Collective[tuple[Tensor, ...]]:
    """Starts the exchange of `start_reduce_scatter` without the sum, for other reductions.

    The result has one tensor [B, T, ...] from each rank, in rank order: that rank's values for this rank's tokens.
    """
    check_tokens("x", x, dim, sum(sizes), sizes)
    send_buffer, shards, works = start_scatter(x, axis, sizes, dim)
    return Collective(axis, (send_buffer, *shards), works, lambda: shards)


def start_scatter(
    x: Tensor, axis: Axis, sizes: Sequence[int], dim: int
) -> tuple[Tensor, tuple[Tensor, ...], tuple[dist.Work, ...]]:
    """Sends each rank its tokens of `x`. Returns (sent tensor, tokens received from each rank, works)."""
    # An all-to-all, whose receiver reduces: in the backend's reduce-scatter we could not choose the order and the
    # precision of the sum.
    if axis.size == 1:
        return x, (x,), ()
    outer, inner = prod(x.shape[:dim]), prod(x.shape[dim + 1 :])
    # If all dims before the tokens have size 1, each rank's tokens are contiguous already.
    values = x.contiguous() if outer == 1 else pack(x.split_with_sizes(list(sizes), dim))
    shape = (*x.shape[:dim], sizes[axis.rank], *x.shape[dim + 1 :])
    send, receive = [outer * size * inner for size in sizes], [prod(shape)] * axis.size
    send_buffer, buffer, works = start_parts(axis, values, send, receive, "reduce_scatter")
    return send_buffer, buffer.view(axis.size, *shape).unbind(0), works


def start_all_reduce(x: Tensor, axis: Axis) -> Collective[Tensor]:
    """Starts to sum a tensor over all C ranks; every rank gets the same bits.

    Bytes sent: 2 (C - 1) / C times the bytes of `x`, kind "all_reduce", as in a ring.
    """
    check_tensor("x", x)
    if axis.size == 1:
        return Collective(axis, (x,), (), lambda: x)
    total = x.clone(memory_format=torch.contiguous_format)  # torch reduces in place
    # A ring reduces and scatters in C - 1 steps, then gathers in as many. The backend may choose another algorithm.
    steps = 2 * (axis.size - 1)
    traced = record(axis.name, "all_reduce", steps * x.nbytes // axis.size, steps)
    work = dist.all_reduce(total, group=axis.group, async_op=True)
    assert work is not None
    return Collective(axis, (total,), end_span_on_wait([work], traced), lambda: total)


# -- tokens for heads -------------------------------------------------------------------------------------------------


class PackedHeads(NamedTuple):
    """Heads of this rank's tokens [B, T, H, D], copied in the order in which they are sent.

    Args:
        flat: for rank 0, then rank 1, ..., the heads [B, T, h, D] that the rank works on. On an axis of one rank, the
            uncopied tensor [B, T, H, D].
        batch, tokens, dim: B, T, D.
        counts: h of each rank.
    """

    flat: Tensor
    batch: int
    tokens: int
    dim: int
    counts: tuple[int, ...]

    @classmethod
    def cut(cls, x: Tensor, heads: Sequence[range]) -> PackedHeads:
        batch, tokens, count, dim = x.shape
        counts, per_rank = _head_counts(tuple(heads), count)
        if len(counts) == 1:
            flat = x
        elif per_rank:  # one strided copy takes a tenth of the host time of one copy for each rank
            flat = x.view(batch, tokens, len(counts), per_rank, dim).permute(2, 0, 1, 3, 4)
            flat = flat.clone(memory_format=torch.contiguous_format)
        else:
            flat = pack([x[:, :, head_range.start : head_range.stop] for head_range in heads])
        return cls(flat, batch, tokens, dim, counts)


@lru_cache(maxsize=256)
def _head_counts(heads: tuple[range, ...], count: int | None = None) -> tuple[tuple[int, ...], int]:
    """Returns (heads of each rank, heads per rank if all ranks have equally many of the `count` heads, else 0)."""
    counts, first = tuple(map(len, heads)), len(heads[0])
    even = all(head_range == range(rank * first, (rank + 1) * first) for rank, head_range in enumerate(heads))
    return counts, first if even and count in (None, first * len(heads)) else 0


def start_seq_to_head(x: Tensor, axis: Axis, sizes: Sequence[int], heads: Sequence[range]) -> Collective[Tensor]:
    """Starts the exchange of tokens for heads: [B, T, H, D] -> [B, sum(sizes), h, D], this rank's heads of all tokens.

    Args:
        x: local tensor with all heads of this rank's tokens; T is `sizes[axis.rank]`.
        sizes: number of tokens on each rank of the axis. The result has the tokens of rank 0, then of rank 1, ...
        heads: for each rank the range of heads that it works on; h is `len(heads[axis.rank])`.

    Bytes sent: B T D e for every head of every other rank, kind "all_to_all".
    """
    return start_packed_to_head(PackedHeads.cut(x, heads), axis, sizes)


def start_packed_to_head(heads: PackedHeads, axis: Axis, sizes: Sequence[int]) -> Collective[Tensor]:
    flat, batch, tokens, dim, counts = heads
    if axis.size == 1:
        return Collective(axis, (flat,), (), lambda: flat)
    # Rank w gets its heads of our tokens, and we get our heads of its tokens. All counts are of elements.
    own_heads = counts[axis.rank]
    elements_per_head, elements_per_token = batch * tokens * dim, batch * own_heads * dim
    send, receive = [elements_per_head * count for count in counts], [elements_per_token * size for size in sizes]
    send_buffer, buffer, works = start_parts(axis, flat, send, receive, "all_to_all")

    def assemble() -> Tensor:
        if batch == 1:  # the tokens of all ranks already lie one after another, in the order of the result
            return buffer.view(1, sum(sizes), own_heads, dim)
        received = zip(buffer.split_with_sizes(receive), sizes, strict=True)
        return torch.cat([values.view(batch, size, own_heads, dim) for values, size in received], dim=1)

    return Collective(axis, (send_buffer,), works, assemble)


def start_head_to_seq(x: Tensor, axis: Axis, sizes: Sequence[int], heads: Sequence[range]) -> Collective[Tensor]:
    """Starts the exchange of heads for tokens: [B, sum(sizes), h, D] -> [B, T, H, D], all heads of this rank's tokens.

    The transpose of `start_seq_to_head`, with its arguments. A head that several ranks worked on is summed over them in
    rank order, in float32 or wider.

    Bytes sent: B h D e for every token of every other rank, kind "all_to_all".
    """
    exchange = start_head_to_parts(x, axis, sizes, heads)
    return Collective(axis, exchange.buffers, exchange.works, lambda: _sum_heads(exchange.assemble(), heads))


def start_head_to_parts(
    x: Tensor, axis: Axis, sizes: Sequence[int], heads: Sequence[range]
) -> Collective[tuple[Tensor, ...]]:
    """Starts `start_head_to_seq` without joining the heads.

    Returns [B, T, h, D] of each rank, in rank order; if every rank has one head, a single view [B, T, H, D].
    """
    if axis.size == 1:
        return Collective(axis, (x,), (), lambda: (x,))
    batch, _, own_heads, dim = x.shape
    counts, per_rank = _head_counts(tuple(heads))
    # With one batch row, the tokens for rank 0, 1, ... lie one after another in x already.
    send_values = x.contiguous() if batch == 1 else pack(x.split_with_sizes(list(sizes), 1))
    shape = batch, sizes[axis.rank]
    send = [batch * own_heads * dim * size for size in sizes]
    receive = [batch * sizes[axis.rank] * dim * count for count in counts]
    send_buffer, buffer, works = start_parts(axis, send_values, send, receive, "all_to_all")

    def assemble() -> tuple[Tensor, ...]:
        if per_rank == 1:  # the dim of ranks is the dim of heads: one permuted view has all heads, without a copy
            return (buffer.view(len(counts), *shape, dim).permute(1, 2, 0, 3),)
        if per_rank:
            return buffer.view(len(counts), *shape, per_rank, dim).unbind(0)
        received = zip(buffer.split_with_sizes(receive), counts, strict=True)
        return tuple(values.view(*shape, count, dim) for values, count in received)

    return Collective(axis, (send_buffer,), works, assemble)


def _sum_heads(head_parts: Sequence[Tensor], heads: Sequence[range]) -> Tensor:
    if len(head_parts) == 1:
        return head_parts[0]
    count = max(head_range.stop for head_range in heads)
    if sum(map(len, heads)) == count:  # no head is on two ranks
        return torch.cat(list(head_parts), dim=2)
    # Key/value heads on several ranks: their gradients are sums over the ranks that used them.
    first = head_parts[0]
    # In rank order, and wide until the sum is complete.
    total = first.new_zeros((*first.shape[:2], count, first.shape[3]), dtype=accumulation_dtype(first.dtype))
    for part, rank_heads in zip(head_parts, heads, strict=True):
        total[:, :, rank_heads.start : rank_heads.stop] += part
    return total.to(first.dtype)


# -- the gradient of a collective -------------------------------------------------------------------------------------

Start = Callable[..., Collective[Tensor]]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Start, adjoint: Start, *call: Any) -> Tensor:
        ctx.call = adjoint, start, *call
        return start(x, *call).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # `linear` again, whose own backward is the first collective: the gradient is differentiable too.
        with phase("backward"):
            return linear(grads[0], *ctx.call), *[None] * len(ctx.call)


def linear(x: Tensor, start: Start, adjoint: Start, *call: Any) -> Tensor:
    """Returns `start(x, *call).wait()`, differentiable; `adjoint(grad, *call)` starts the collective of backward."""
    return cast(Tensor, _Linear.apply(x, start, adjoint, *call))


# -- all-to-all of parts ----------------------------------------------------------------------------------------------


def start_parts(
    axis: Axis, values: Tensor, send: Sequence[int], receive: Sequence[int], kind: str
) -> tuple[Tensor, Tensor, tuple[dist.Work, ...]]:
    """Starts an all-to-all of send[w] elements to rank w of the axis, and receive[w] elements from it.

    Args:
        values: contiguous tensor of the parts for rank 0, 1, ..., one after another, as `pack` returns them.
        kind: kind under which the ledger counts the bytes sent to other ranks.

    Returns:
        (sent tensor, flat buffer that receives the parts in rank order, works).
    """
    buffer, own_count = values.new_empty(sum(receive)), send[axis.rank]
    messages = len(send) - send.count(0) - (own_count > 0)
    trace_record = record(axis.name, kind, values.nbytes - own_count * values.itemsize, messages)
    works = (compat.all_to_all_single(buffer, values.view(-1), receive, send, axis.group),)
    return values, buffer, works if trace_record is None else end_span_on_wait(works, trace_record)


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Copies the parts one after another into one tensor: [parts, *shape] if all have the same shape, else flat."""
    if all(tensor.shape == parts[0].shape for tensor in parts):
        flat = parts[0].new_empty((len(parts), *parts[0].shape))
        return torch.stack(list(parts), out=flat)  # without `out`, stack keeps strides that all parts share
    sizes = [tensor.numel() for tensor in parts]
    flat = parts[0].new_empty(sum(sizes))
    for target, tensor in zip(flat.split(sizes), parts, strict=True):
        target.view(tensor.shape).copy_(tensor)
    return flat


# -- checks -----------------------------------------------------------------------------------------------------------


def tokens_on(x: Tensor, dim: int) -> int:
    check_tensor("x", x)
    if not 0 <= integer("dim", dim) < x.ndim:
        raise ValueError(f"x {tuple(x.shape)} has no dim {dim}; its dims are 0..{x.ndim - 1}")
    return x.shape[dim]


def check_tokens(name: str, x: Tensor, dim: int, tokens: int, sizes: Sequence[int]) -> None:
    if tokens_on(x, dim) != tokens:
        raise ValueError(f"{name} {tuple(x.shape)} must have {tokens} tokens on dim {dim}: sizes are {tuple(sizes)}")


def check_dims(x: Tensor) -> None:
    check_tensor("x", x)
    if x.ndim != 4:
        raise ValueError(f"x {tuple(x.shape)} needs 4 dims, [batch, tokens, heads, head dim]")


def check_heads(heads: Sequence[range], axis: Axis, count: int | None) -> None:
    """Raises ValueError unless each rank has a range of heads, in order and without gaps, up to `count` if known."""
    requirement = f"one range for each of the {axis.size} ranks of axis {axis.name!r}"
    if len(heads) != axis.size or not all(isinstance(head_range, range) for head_range in heads):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"heads {list(heads)}: {requirement} is needed")
    in_order = all(a.start <= b.start <= a.stop <= b.stop for a, b in pairwise(heads))
    if (
        not in_order
        or heads[0].start != 0
        or any(head_range.step != 1 or head_range.stop < head_range.start for head_range in heads)
    ):
        raise ValueError(f"heads {list(heads)}: {requirement}, from 0 on, in order and without gaps, is needed")
    if count is not None and heads[-1].stop != count:
        raise ValueError(f"heads {list(heads)} end at {heads[-1].stop}; there are {count} heads")
