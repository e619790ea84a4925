"""Finding the documents of packed rows from position ids, of which every rank sees only its own.

A token at global position p with position id i lies in the document that starts at p - i. Ranks tell each other the
starts that they see, with the first and the last token that has each; so all of them find the same documents, or the
same fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.attention.context_parallel.sequence import Documents, check_tokens
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.core import Axis, SequenceLayout
from armillary.core.observe.trace import record, watched


class PackedRun(NamedTuple):
    """Tokens of a row whose document starts at `start`: the first and the last of them, in global positions."""

    row: int
    start: int
    first: int
    last: int


REMEDY = "pass position_ids=layout.positions(attend.shard)[None], or position ids that restart at 0 in each document"


def find_documents(position_ids: Tensor, layout: SequenceLayout, attend: Method, first: int = 0) -> Documents | None:
    """Returns the documents of position ids [B or 1, T] of all ranks; None where each row is one document.

    Communicates: every rank of `attend` must call it.

    Args:
        first: the position id of a document's first token.

    Raises:
        ValueError: on every rank, if they neither are global positions nor restart at `first` in each document.
    """
    runs = gather(_runs(position_ids - first, layout.positions(attend.shard)), attend)
    rows = [[PackedRun(*run) for run in runs if run[0] == row] for row in range(position_ids.shape[0])]
    documents = [_boundaries(row, layout.length, first) for row in rows]
    _check_not_shards(documents, layout, first)
    if all(ends == (0, layout.length) for ends in documents):
        return None
    return documents[0] if len(set(documents)) == 1 else tuple(documents)


def check_positions(position_ids: Tensor, layout: SequenceLayout, attend: Method, documents: Documents) -> None:
    """Refuses position ids [B or 1, T] that do not rise from token to token of each document, over all ranks.

    They may start anywhere and leave positions out. Communicates where it can: every rank of `attend` must call it.

    Raises:
        ValueError: on every rank, if those of one do not fit.
    """
    mask = AttentionMask(documents=documents)
    rows = max(len(position_ids), len(documents) if mask.per_row else 1)
    mask.check(layout.length, layout.length, rows)
    boundaries = [mask.boundaries(row) or (0, layout.length) for row in range(rows)]
    runs = _runs(position_ids.expand(rows, -1), layout.positions(attend.shard), boundaries)
    if axes(attend) is not None:
        runs = [PackedRun(*run) for run in gather(runs, attend)]
    for row, ends in enumerate(boundaries):
        for low, high in pairwise(ends):
            _check_rising(row, [run for run in runs if run.row == row and low <= run.first < high])


def check_shards(tokens: int, positions: int, layout: SequenceLayout, attend: Method) -> None:
    """Refuses, on every rank, shards with other numbers of tokens or position ids than the layout has there."""
    shards = [[attend.shard, tokens, positions]]
    for shard, count, ids in gather(shards, attend) if axes(attend) is not None else shards:
        check_tokens(shard, count, layout)
        if ids != count:
            raise ValueError(f"shard {shard} has {count} tokens and {ids} position ids; {REMEDY}")


def gather(rows: Sequence[Sequence[int]], attend: Method) -> list[list[int]]:
    """The rows of integers of all ranks of `attend`, each row as long as the others. Every rank must call it."""
    gathered = [list(row) for row in rows]
    for axis in method_axes(attend):
        width = len(gathered[0])
        mine = torch.tensor(gathered, dtype=torch.int64, device=_device(axis))
        counts = _all_gather(axis, torch.tensor([len(gathered)], device=mine.device))
        padded = mine.new_zeros((max(int(count) for count in counts), width))
        padded[: len(mine)] = mine
        parts = zip(_all_gather(axis, padded), counts, strict=True)
        gathered = [row for part, count in parts for row in part[: int(count)].tolist()]
    return gathered


def sum_over_ranks(x: Tensor, attend: Method) -> Tensor:
    """The sum of a small tensor over all ranks of `attend`, on each in the same order. Every rank must call it."""
    return sum_over_axes(x, method_axes(attend))


def sum_over_axes(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Returns the sum of a tensor over the ranks of axes. Every rank must call it.

    Gathers and adds in one order instead of reducing, so that all ranks get the same bits.
    """
    for axis in axes:
        x = torch.stack(_all_gather(axis, x.to(_device(axis)).contiguous())).sum(0).to(x.device)
    return x


def all_gather_over(x: Tensor, attend: Method) -> list[Tensor]:
    """The tensors of all ranks of `attend`, of one shape, in the order of `gather`. Every rank must call it."""
    parts, device = [x], x.device
    for axis in method_axes(attend):
        joined = _all_gather(axis, torch.stack(parts).to(_device(axis)))
        parts = [part for several in joined for part in several]
    return [part.to(device) for part in parts]


def method_axes(attend: Method) -> list[Axis]:
    """Returns the axes of a method; raises ValueError if they are unknown."""
    along = axes(attend)
    if along is None:
        raise ValueError(
            f"{type(attend).__name__} does not say which axes its {attend.shards} ranks are on, so that ranks cannot "
            "tell each other what they see; pass sequence(documents=...), [0, length] if there is one document"
        )
    return along


def _runs(
    position_ids: Tensor, positions: Tensor, boundaries: Sequence[Sequence[int]] | None = None
) -> list[PackedRun]:
    """The runs that this rank sees, a start at a time; those of documents apart, where their boundaries are given."""
    runs: list[PackedRun] = []
    for row, ids in enumerate(position_ids.cpu().long()):
        ends = torch.tensor(boundaries[row] if boundaries else (0,))
        keys = torch.stack([torch.bucketize(positions, ends, right=True), positions - ids])
        keys, which = keys.unique(dim=1, return_inverse=True)
        first = torch.full_like(keys[1], 2**62).scatter_reduce(0, which, positions, "amin")
        last = torch.full_like(keys[1], -1).scatter_reduce(0, which, positions, "amax")
        runs += [PackedRun(row, *run) for run in zip(keys[1].tolist(), first.tolist(), last.tolist(), strict=True)]
    return runs


def _check_rising(row: int, runs: Sequence[PackedRun]) -> None:
    """Refuses the runs of one document on all ranks, if position ids do not rise in it.

    They do where tokens leave out more and more positions, so that what `start` says falls from run to run.
    """
    spans: dict[int, tuple[int, int]] = {}
    for _, start, first, last in runs:
        low, high = spans.get(start, (first, last))
        spans[start] = min(low, first), max(high, last)
    ordered = sorted(spans.items(), key=lambda span: span[1])
    for (start, (_, last)), (after, (first, _)) in pairwise(ordered):
        if last > first or after > start:
            raise ValueError(
                f"the token at position {first} of row {row} has position id {first - after}, which is not beyond "
                f"those of the tokens before it in its document; {REMEDY}"
            )


def _boundaries(runs: Sequence[PackedRun], length: int, first_position: int) -> tuple[int, ...]:
    """Returns the document boundaries of one row; each run of all ranks together must fill one document."""
    spans: dict[int, tuple[int, int]] = {}
    for _, start, first, last in runs:
        low, high = spans.get(start, (first, last))
        spans[start] = min(low, first), max(high, last)
    starts = sorted(spans)
    ends = (*starts, length)
    for start, end in pairwise(ends):
        if spans[start] != (start, end - 1):
            at = spans[start][0]
            raise ValueError(
                f"the token at position {at} of the sequence has position id {at - start + first_position}, so that "
                f"its document would start at {start}, which the other position ids contradict; {REMEDY}"
            )
    if starts[0] != 0:
        raise ValueError(
            f"no row starts with position id {first_position}: the first document would start at {starts[0]}; {REMEDY}"
        )
    return ends


def _check_not_shards(found: Sequence[tuple[int, ...]], layout: SequenceLayout, first_position: int) -> None:
    """Refuses position ids that restart on every rank: a mistake far more often than documents as long as shards."""
    shards = sorted((layout.spans(shard) for shard in range(layout.shards)), key=lambda spans: spans[0][0])
    firsts = (*(spans[0][0] for spans in shards), layout.length)
    if layout.shards > 1 and all(len(spans) == 1 for spans in shards) and any(ends == firsts for ends in found):
        raise ValueError(
            f"position_ids start at {first_position} on each of the {layout.shards} ranks, as a model's own do; "
            f"{REMEDY}. If the documents do end where shards do, pass `sequence(documents={list(firsts[:4])}...)`"
        )


def axes(attend: Method) -> list[Axis] | None:
    """The axes that a method and those inside it run on, of more than one rank; None where that cannot be found."""
    found: list[Axis] = []
    method: Any = attend
    while method is not None:
        axis = getattr(method, "axis", None)
        found += [axis] if isinstance(axis, Axis) and axis.size > 1 else []
        method = getattr(method, "inner", None)
    return found if prod(axis.size for axis in found) == attend.shards else None


def _all_gather(axis: Axis, x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    under_way = record(axis.name, "all_gather", (axis.size - 1) * x.nbytes, axis.size - 1)
    work = dist.all_gather(parts, x, group=axis.group, async_op=True)
    watched([work], under_way)[0].wait()
    return parts


def _device(axis: Axis) -> torch.device:
    """Where the group of an axis takes tensors: anywhere for gloo, on this rank's accelerator for others.

    A group that torch has started for all devices, as `init_device_mesh` does, has no one backend to ask for.
    """
    if axis.device == "cpu" or dist.get_backend(axis.group) == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
