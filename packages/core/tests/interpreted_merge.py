"""The fused merge under Triton's interpreter, compared with torch's ops: `python interpreted_merge.py [EVERY]`.

Prints the cases that differ, of all cases or of every EVERYth. Run with TRITON_INTERPRET=1, which is read when Triton
is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.core.collectives.fused_merge import fused_merge_
from armillary.core.collectives.merge import merge_by_ops_

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SHAPES = ((2, 15, 3, 128), (1, 1, 1, 1), (3, 5, 2, 96), (1, 4, 1, 1500), (7, 8), (5,), (2, 0, 3, 8))
LAYOUTS = ("contiguous", "heads first", "strided", "packed", "columns first", "expanded")


class Merged(NamedTuple):
    """Arguments of `merge_`: accumulators and a partial result."""

    out: Tensor
    lse: Tensor
    part_out: Tensor
    part_lse: Tensor


def poisoned(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Returns x in another memory layout and its storage, which has NaN between and around the elements."""
    if layout == "heads first" and x.ndim >= 3:
        full = x.transpose(1, 2).contiguous()
        return full.transpose(1, 2), full
    if layout == "columns first":
        full = x.mT.contiguous() if x.ndim > 1 else x.clone()
        return full.mT if x.ndim > 1 else full, full
    if layout == "expanded":
        return x[:1].expand(x.shape), x[:1].clone()
    if layout == "contiguous" or x.ndim == 0:
        return x, x
    pad = 1 if layout == "packed" else 3
    full = x.new_full([2 * size + pad for size in x.shape[:-1]] + [x.shape[-1] + pad], torch.nan)
    view = full[tuple(slice(pad, pad + 2 * size, 2) for size in x.shape[:-1])][..., : x.shape[-1]]
    view.copy_(x)
    return view, full


def draw_arguments(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Merged:
    """Random results. Some rows have no visible key on one side, on the other or on both, or a much smaller lse."""
    torch.manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out, part = torch.randn(shape, dtype=wide), torch.randn(shape, dtype=dtype)
    lse, part_lse = torch.randn((2, *shape[:-1]), dtype=wide).mul(4).unbind(0)
    kind = torch.arange(max(lse.numel(), 1))[: lse.numel()].view(lse.shape) % 7
    lse, part_lse = lse.clone(), part_lse.clone()
    for unseen, x, its_lse in ((kind == 1, out, lse), (kind == 2, part, part_lse)):
        hidden = unseen | (kind == 3)
        x[hidden], its_lse[hidden] = 0, -torch.inf
    lse[kind == 4] += 1e4
    part_lse[kind == 5] += 1e4
    part_lse[kind == 6] = lse[kind == 6]
    return Merged(out, lse, part, part_lse)


def differs(expected: Tensor, got: Tensor) -> bool:
    """Returns True if they differ by more than a few roundings. Two NaN are equal."""
    same = torch.finfo(expected.dtype).eps
    return not torch.allclose(got, expected, rtol=8 * same, atol=8 * same, equal_nan=True)


def failures(shape: tuple[int, ...], dtype: torch.dtype, layout: str, poison: bool) -> Iterator[str]:
    """Yields the tensors that differ from torch's ops, and those whose surrounding memory changed."""
    arguments = draw_arguments(shape, dtype, seed=len(shape))
    if layout == "expanded":  # only the operands that are not written to
        part_out, part_lse = (x[:1].expand(x.shape) for x in (arguments.part_out, arguments.part_lse))
        arguments = arguments._replace(part_out=part_out, part_lse=part_lse)
    if poison and arguments.lse.numel() > 2:
        arguments.part_out.view(-1, shape[-1])[1] = torch.nan
        arguments.part_lse.view(-1)[2] = torch.nan
    expected = Merged(*(x.clone() for x in arguments))
    merge_by_ops_(*expected)
    accumulators = "contiguous" if layout == "expanded" else layout
    placed = [poisoned(x, how) for x, how in zip(arguments, (*[accumulators] * 2, *[layout] * 2), strict=True)]
    views, storages = Merged(*(view for view, _ in placed)), [full for _, full in placed]
    before = [full.clone() for full in storages]
    fused_merge_(*views)
    yield from (name for name in ("out", "lse") if differs(getattr(expected, name), getattr(views, name)))
    for name, view, full, old in zip(Merged._fields, views, storages, before, strict=True):
        is_untouched = torch.ones_like(full, dtype=torch.bool)
        if name in ("out", "lse"):
            is_untouched.as_strided(view.shape, view.stride(), view.storage_offset()).zero_()
        if not torch.equal(full[is_untouched].nan_to_num(7.0), old[is_untouched].nan_to_num(7.0)):
            yield f"memory of {name}, or beside it, was written to"


def cases() -> list[tuple[tuple[int, ...], torch.dtype, str, bool]]:
    """All shapes, dtypes, layouts and poisonings; accumulators are never expanded."""
    every = product(SHAPES, DTYPES, LAYOUTS, (False, True))
    return [case for case in every if case[2] != "expanded" or (len(case[0]) > 1 and not case[3])]


def main(every: int = 1) -> None:
    chosen, failed = cases()[::every], list[str]()
    for shape, dtype, layout, poison in chosen:
        names = failures(shape, dtype, layout, poison)
        failed += [f"{shape}, {dtype}, {layout}{', poisoned' * poison}: {name}" for name in names]
    print(json.dumps({"tried": len(chosen), "failed": failed}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
