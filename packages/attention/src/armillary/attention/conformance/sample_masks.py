"""The masks of the fixed sample: each kind once or twice, made to fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from armillary.attention.conformance.case import Case
from armillary.attention.mask import AttentionMask, Slice

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
    "chunked": lambda length, batch, keys: AttentionMask.chunked(length // 5, (0, length // 3, length)),
    "image-spans": lambda length, batch, keys: spans(length),
    "blocks": lambda length, batch, keys: blocks(length, keys),
    "kinds": lambda length, batch, keys: AttentionMask.rows(every_kind(length)[:batch]),
}
"""Masks by name, made to fit (length, batch, number of keys)."""
ANY_KEYS = ("full", "causal", "window", "band", "slices", "blocks")
"""Those that may have other numbers of queries and keys."""


def slices(length: int, keys: int) -> AttentionMask:
    """Two bands on one rectangle, above and below a gap; and queries of which a third sees one run of keys."""
    half, rest = length // 2, range(keys // 3, keys)
    above, below = Slice(range(half), rest, 2, None), Slice(range(half), rest, None, -1)
    return AttentionMask.of_slices([above, below, Slice(range(half + 2, length), range(5, keys - 2))])


def tree(length: int) -> AttentionMask:
    """A prompt, an answer with two of its own, another answer, and one more prompt."""
    ends = (0, length // 4, length // 3, length // 2, length // 2 + 4, length - 5, length)
    return AttentionMask.tree(ends, (-1, 0, 1, 1, 0, -1))


def spans(length: int) -> AttentionMask:
    """Two documents with an image each, under a window shorter than the first one."""
    images = range(2, length // 3), range(length - 6, length - 2)
    return AttentionMask.image_spans(images, (0, length // 2, length), window=(length // 5, None))


def blocks(length: int, keys: int) -> AttentionMask:
    """Blocks of seven tokens: rows of them alike and not, one of which sees nothing."""
    rows, columns = -(-length // 7), -(-keys // 7)
    visible = [[(a // 2 + b) % 3 != 1 and a != 2 for b in range(columns)] for a in range(rows)]
    return AttentionMask.blocks(visible, 7)


def every_kind(length: int) -> list[AttentionMask]:
    """A mask of each kind: the tree under a window along its paths, and what is not causal cut so."""
    return [
        replace(tree(length), window=(length // 4, None)),
        spans(length),
        replace(blocks(length, length), causal=True),
        AttentionMask.prefix((0, length // 3, length), (0, length // 5)),
        AttentionMask.chunked(length // 6, origin="row"),
        replace(slices(length, length), window=(length // 2, 5)),
        AttentionMask(documents=(0, length // 2, length)),
    ]


def with_every_kind(case: Case) -> Case:
    """The case with a batch of a row for each kind of mask."""
    masks = every_kind(case.length)
    return replace(case, batch=len(masks), mask=AttentionMask.rows(masks), key_length=None)
