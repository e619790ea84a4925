"""The masks of the fixed sample, one or two of each kind, for any length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from armillary.attention import AttentionMask, Slice
from conformance.case import Case

MASKS: dict[str, Callable[[int, int, int], AttentionMask]] = {
    "full": lambda length, batch, keys: AttentionMask(causal=False),
    "causal": lambda length, batch, keys: AttentionMask(),
    "window": lambda length, batch, keys: AttentionMask(window=(length // 5, None)),
    "band": lambda length, batch, keys: AttentionMask(causal=False, window=(length // 4, 3)),
    "documents": lambda length, batch, keys: AttentionMask(documents=(0, 1, length // 3, length // 2 + 2, length)),
    "rows": lambda length, batch, keys: AttentionMask(
        causal=False, documents=tuple((0, length // (row + 2), length) for row in range(batch))
    ),
    "slices": lambda length, batch, keys: slices(length, keys),
    "tree": lambda length, batch, keys: tree(length),
    "prefix": lambda length, batch, keys: AttentionMask.prefix((0, length // 2 + 2, length), (length // 4, 3)),
    "chunked": lambda length, batch, keys: AttentionMask.chunked(length // 3, (0, length // 2, length)),
    "image-spans": lambda length, batch, keys: spans(length),
    "blocks": lambda length, batch, keys: blocks(length, keys),
    "kinds": lambda length, batch, keys: AttentionMask.rows(every_kind(length)[:batch]),
}
"""Masks by name, for (length, batch, number of keys)."""
PLAIN = ("full", "causal", "window", "band", "documents", "rows")
"""Masks that have only causality, windows and documents."""
ANY_KEYS = ("full", "causal", "window", "band", "slices", "blocks")
"""Masks that support different numbers of queries and keys."""


def slices(length: int, keys: int) -> AttentionMask:
    """Two bands on one rectangle with a gap between them, and later queries that see one range of keys."""
    half, later_keys = length // 2, range(keys // 3, keys)
    upper, lower = Slice(range(half), later_keys, 2, None), Slice(range(half), later_keys, None, -1)
    return AttentionMask.of_slices([upper, lower, Slice(range(half + 2, length), range(5, keys - 2))])


def tree(length: int) -> AttentionMask:
    """A prompt with two answers, one of which has an answer itself, and another prompt."""
    ends = (0, length // 3, length // 2, length - 9, length - 4, length)
    return AttentionMask.tree(ends, (-1, 0, 1, 0, -1))


def spans(length: int) -> AttentionMask:
    """Two documents with an image each, under a window shorter than the first image."""
    images = range(2, length // 3), range(length - 6, length - 2)
    return AttentionMask.image_spans(images, (0, length // 2, length), window=(length // 5, None))


def blocks(length: int, keys: int) -> AttentionMask:
    """Three or four rows of blocks: two equal ones, and one that sees nothing."""
    block = length // 3
    rows, columns = -(-length // block), -(-keys // block)
    return AttentionMask.blocks(
        [[a != 2 and (a // 2 + b) % 3 != 1 for b in range(columns)] for a in range(rows)], block
    )


def every_kind(length: int) -> list[AttentionMask]:
    """A small mask of each kind: the tree with a window along its paths, the blocks causal."""
    third, half = length // 3, length // 2
    table = [[True, False], [True, True]]
    return [
        AttentionMask.tree((0, third, half, length), (-1, 0, 0), window=(length // 4, None)),
        AttentionMask.image_spans([range(2, third)], (0, half, length), window=(length // 5, None)),
        AttentionMask.blocks(table, -(-length // 2), causal=True),
        AttentionMask.prefix((0, length), (third,)),
        AttentionMask.chunked(half, origin="row"),
        replace(AttentionMask.of_slices([Slice(range(half), range(third, length), 1, None)]), window=(None, half)),
    ]


def with_every_kind(case: Case) -> Case:
    """Returns the case with one row for each kind of mask, made cheaper: float64, small heads."""
    length, dim = min(case.length, 37), min(case.head_dim, 16)
    masks = every_kind(length)
    case = replace(case, batch=len(masks), mask=AttentionMask.rows(masks), length=length, key_length=None)
    return replace(case, head_dim=dim, value_dim=dim, heads=8, kv_heads=2, dtype=torch.float64)


def some_masks(masks: Sequence[str], number: int) -> list[str]:
    """Returns all plain masks and every third of the others, different ones for each of three numbers."""
    patterns = [name for name in masks if name not in PLAIN]
    return [name for name in masks if name in PLAIN] + (patterns[number % 3 :: 3] or patterns)
