"""Values that must be equal on all ranks of a sequence, compared by a gather of digests that the host reads later.

Different rows on the ranks of a sequence raise no error in attention: losses look plausible, and gradients are wrong.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from threading import get_ident
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from armillary.attention.context_parallel.communication import axis_device, method_axes
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout, start_all_gather, to_device
from armillary.core.internal import compat

CHUNK = 2**22
"""Elements of a tensor whose digest is computed at once: their int64 copies take 32 MiB each."""
GOLDEN, MIX = -7046029254386353131, -4658895280553007687  # 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
"""Odd multipliers of splitmix64, as signed integers."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RankComparison:
    """A gather in flight of digests of named values, over all ranks of a method. Every rank must start it.

    Tensors, masks, layouts, numbers and texts are compared to the bit, also inside of nested values; other values are
    not compared. Digests of tensors are computed on their device and depend on the order of elements. The host does not
    wait before the result is read; on several axes of gloo, it waits for the ranks of all axes but the outermost one.

    Bytes sent: an `all_gather` of 8 for each name and 8 more, on one axis after another, with those of all ranks so
    far.

    Args:
        values: with the same names in the same order on every rank.
    """

    def __init__(self, values: Mapping[str, Any], method: Method) -> None:
        axes = method_axes(method)
        device = axis_device(axes[-1])
        self.names: tuple[str, ...] = tuple(values)
        self.digests: Tensor = digests_of(values.values(), device)
        # 1. The rank comes first, because a method may number its shards otherwise.
        rank = torch.full((1,), dist.get_rank(), device=device)
        gathered = torch.cat([rank, self.digests])[None]
        for axis in axes[:-1]:
            gathered = start_all_gather(gathered, axis, [len(gathered)] * axis.size, 0).wait()
        pending = start_all_gather(gathered, axes[-1], [len(gathered)] * axes[-1].size, 0)
        self._works, self._event = pending.works, None
        if device.type == "cuda":
            # 2. The stream waits for the gather and copies the result before it computes the batch. So a host that
            # reads it later waits for this event, not for the batch.
            on_device = pending.wait()
            result = torch.empty(on_device.shape, dtype=torch.int64, pin_memory=True)
            result.copy_(on_device, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
            self._read = lambda: result
        else:
            self._read = pending.wait

    @property
    def complete(self) -> bool:
        """True if `unequal` does not wait."""
        return self._event.query() if self._event is not None else all(work.is_completed() for work in self._works)

    @cached_property
    def unequal(self) -> dict[str, list[list[int]]]:
        """For each name whose values differ, the global ranks with equal values, as groups; the same on every rank.

        Raises:
            TimeoutError, ConnectionError, RuntimeError: as `Collective.wait`; a rank did not start the comparison.
        """
        if self._event is not None:
            self._event.synchronize()
        lines = sorted(self._read().tolist())
        unequal = dict[str, list[list[int]]]()
        for i, name in enumerate(self.names, start=1):
            groups = dict[int, list[int]]()
            for line in lines:
                groups.setdefault(line[i], []).append(line[0])
            if len(groups) > 1:
                unequal[name] = list(groups.values())
        return unequal

    def check(self) -> None:
        """Raises ValueError on every rank if values differ between ranks."""
        if self.unequal:
            raise ValueError(
                f"ranks that share a sequence were given different {describe_unequal(self.unequal)}: all of them need "
                "the same rows. A sampler (DistributedSampler, one that a launcher added, or accelerate's without "
                "share_rows), a dataset or a collator draws from random numbers of each rank"
            )


class RowsCheck:
    """Comparisons of the rows of batches, one after another; none on one rank.

    Only the thread that made it compares: batches that a reader's thread shards come in another order on each rank.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        self._newest: RankComparison | None = None
        self._shapes: list[torch.Size] | None = None  # of the tensors that were compared last
        self._thread, self._is_open = get_ident(), False

    def __deepcopy__(self, memo: object) -> RowsCheck:
        return RowsCheck(self.method)  # a gather in flight has no copy

    @property
    def newest(self) -> RankComparison | None:
        """The last comparison, unless it has raised; None in another thread and in a compiled graph."""
        return None if torch.compiler.is_compiling() or get_ident() != self._thread else self._newest

    @contextmanager
    def comparing(self, values: Mapping[str, Any]) -> Generator[None]:
        """Context of everything that ranks make of `values`. Inside another such context it does nothing."""
        if self._is_open or self.method.shards == 1 or get_ident() != self._thread or not has_values(dict(values)):
            yield
            return
        # 1. Before any error, also that of the batch before: every rank starts as many comparisons.
        previous, self._newest = self._newest, RankComparison(values, self.method)
        if previous is not None:
            previous.check()
        # 2. Attention on rows of other lengths would end in an abort of gloo or a hang of NCCL. So the host waits for
        # the first batch, and for one of another shape than the batch before.
        shapes = [x.shape for x in pytree.tree_leaves(dict(values)) if isinstance(x, Tensor)]
        reads_at_once, self._shapes = shapes != self._shapes, shapes
        self._is_open = True
        try:
            yield
        except Exception:
            self.check()  # different rows are a likelier cause
            raise
        finally:
            self._is_open = False
        if reads_at_once:
            self.check()

    def check(self) -> None:
        """Raises the error of the last comparison, once."""
        if (newest := self.newest) is not None:
            self._newest = None if newest.unequal else newest
            newest.check()


def digests_of(values: Iterable[Any], device: torch.device) -> Tensor:
    """Returns a number for each value, [n] of int64 on `device`, equal for equal values in every process."""
    leaves = [pytree.tree_leaves(value) for value in values]
    # The host computes a part of each digest, the device of the tensors the other one.
    texts = torch.tensor([crc32(repr([_text(x) for x in row]).encode()) for row in leaves])
    sums = [_digest([x for x in row if isinstance(x, Tensor)], device) for row in leaves]
    return to_device(texts, device) + torch.stack(sums)


def describe_unequal(unequal: Mapping[str, list[list[int]]]) -> str:
    """Returns a text such as "ids (ranks [0, 1] have others than [2])" for the result of `RankComparison.unequal`."""
    groups = {name: " than ".join(f"{ranks!s:.60}" for ranks in by_value) for name, by_value in unequal.items()}
    return ", ".join(f"{name} (ranks {text.replace(' than', ' have others than', 1)})" for name, text in groups.items())


def has_values(x: object) -> bool:
    """Returns False for tensors without values: fake ones, and those on the meta device."""
    return not compat.fakes_tensors() and not any(isinstance(y, Tensor) and y.is_meta for y in pytree.tree_leaves(x))


def _text(x: object) -> object:
    """Returns the part of a value that the host compares. It is equal in every process, as Python's hashes are not."""
    if isinstance(x, Tensor):
        return tuple(x.shape), str(x.dtype)
    if isinstance(x, AttentionMask):
        return hash(x)
    if isinstance(x, SequenceLayout):
        return x.text
    if x is None or isinstance(x, bool | int | float | str):
        return x
    return x.tolist() if isinstance(x, np.generic | np.ndarray) else "not compared"


def _digest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns a number, [] of int64, of all elements of the tensors and of their order."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for x in tensors:
        local = compat.local_part(x.detach())
        local = torch.view_as_real(local) if local.is_complex() else local
        bits = local.contiguous().view(INTEGERS[local.itemsize]) if local.is_floating_point() else local
        for i, chunk in enumerate(bits.flatten().split(CHUNK)):
            # splitmix64 of each element, mixed with its index. int64 wraps around, in products and in the sum.
            index = torch.arange(i * CHUNK, i * CHUNK + len(chunk), device=chunk.device)
            mixed = chunk.long() ^ (index * GOLDEN)
            mixed = (mixed ^ (mixed >> 32)) * MIX
            mixed = (mixed ^ (mixed >> 29)) * GOLDEN
            total = total + (mixed ^ (mixed >> 32)).sum().to(device)
        total = total * MIX  # the order of tensors counts too
    return total
