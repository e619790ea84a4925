"""A collective in flight, and the all-to-all of parts of any sizes by which most collectives here are implemented.

`accumulation_dtype` is the dtype in which collectives and attention add partial results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.core import compat
from armillary.core.collectives.exchange import finish
from armillary.core.mesh import Axis
from armillary.core.observe import end_span_on_wait, record
from armillary.core.validation import check_tensor, integer

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


class PartsInFlight(NamedTuple):
    """An all-to-all in flight: the sent tensor, the flat buffer that receives parts in rank order, and the works."""

    send_buffer: Tensor
    receive_buffer: Tensor
    works: tuple[dist.Work, ...]


def start_parts(axis: Axis, values: Tensor, send: Sequence[int], receive: Sequence[int], kind: str) -> PartsInFlight:
    """Starts an all-to-all that sends send[w] elements to rank w of the axis and receives receive[w] elements from it.

    Args:
        values: contiguous tensor of the parts for rank 0, 1, ..., one after another, as `pack` returns them.
        kind: kind under which the ledger counts the bytes sent to other ranks.
    """
    buffer, own_count = values.new_empty(sum(receive)), send[axis.rank]
    messages = len(send) - send.count(0) - (own_count > 0)
    trace_record = record(axis.name, kind, values.nbytes - own_count * values.itemsize, messages)
    works = (compat.all_to_all_single(buffer, values.view(-1), receive, send, axis.group),)
    return PartsInFlight(values, buffer, works if trace_record is None else end_span_on_wait(works, trace_record))


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


def tokens_on(x: Tensor, dim: int) -> int:
    """Returns the size of `dim`. Raises ValueError for values that are not tensors, and unknown dims."""
    check_tensor("x", x)
    if not 0 <= integer("dim", dim) < x.ndim:
        raise ValueError(f"x {tuple(x.shape)} has no dim {dim}; its dims are 0..{x.ndim - 1}")
    return x.shape[dim]


def check_tokens(name: str, x: Tensor, dim: int, tokens: int, sizes: Sequence[int]) -> None:
    """Raises ValueError unless `x` has `tokens` tokens on `dim`. `name` and `sizes` are for the message."""
    if tokens_on(x, dim) != tokens:
        raise ValueError(f"{name} {tuple(x.shape)} must have {tokens} tokens on dim {dim}: sizes are {tuple(sizes)}")
