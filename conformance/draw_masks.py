"""Random masks of every kind: about half have only causal, windows and documents, the others a pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

from armillary.attention import AttentionMask, Slice
from armillary.attention.mask import RowMasks

MaskDraw = Callable[[Random, int], AttentionMask]
"""Draws a mask for a sequence of this many tokens."""


def drawn_mask(random: Random, length: int, keys: int, batch: int) -> AttentionMask:
    """Draws any mask that `length` queries and `keys` keys can have.

    Args:
        batch: number of rows, each of which may have another mask; 0: one mask for all rows.
    """
    if random.random() < 0.5:
        return plain_mask(random, length, batch, documents=keys == length and random.random() < 0.4)
    if keys != length:
        return cut(random, random.choice((slice_mask, block_mask))(random, length, keys), length)
    if batch and random.random() < 0.2:
        return cut(random, row_masks(random, length, batch), length)
    return cut(random, random.choice(DRAWS)(random, length), length)


def plain_mask(random: Random, length: int, batch: int = 0, *, documents: bool = True) -> AttentionMask:
    """Draws a mask without a pattern: causality, a window and documents, for all rows or for each of `batch` rows."""
    window = tuple(_edge(random, length) for _ in range(2)) if random.random() < 0.4 else None
    rows = [drawn_documents(random, length) for _ in range(batch or 1)] if documents else None
    shared = rows is not None and (not batch or random.random() < 0.5)
    return AttentionMask(random.random() < 0.6, window, rows[0] if rows and shared else rows)


def row_masks(random: Random, length: int, batch: int) -> AttentionMask:
    """Draws a mask for each row, often of different kinds."""
    return AttentionMask.rows([cut(random, _any_kind(random)(random, length), length) for _ in range(batch)])


def cut(random: Random, mask: AttentionMask, length: int) -> AttentionMask:
    """Adds a window or causality to some masks; not causality to `RowMasks`, whose rows have their own."""
    causal = mask.causal or (random.random() < 0.2 and not isinstance(mask.pattern, RowMasks))
    window = (_edge(random, length), _edge(random, length)) if random.random() < 0.3 else mask.window
    return replace(mask, causal=causal, window=window)


def tree_mask(random: Random, length: int) -> AttentionMask:
    """Draws a chain, children of one root, a forest, or a mixture, of one segment to about one per token."""
    cuts = {random.randint(1, length - 1) for _ in range(random.choice((0, 2, 5, 12, length)))} if length > 1 else set()
    ends = [0, *sorted(cuts), length]
    # `line` is the path from a root to the newest segment. With probability `forest` a segment is a new root. Otherwise
    # it continues the newest segment with probability `deep`, or else a random segment on the path.
    forest, deep = random.choice((0.0, 0.0, 0.3, 1.0)), random.choice((0.0, 0.5, 0.8, 1.0))
    parents, line = [-1], [0]
    for segment in range(1, len(ends) - 1):
        if random.random() < forest:
            line = []
        elif random.random() >= deep:
            del line[random.randint(1, len(line)) :]
        parents.append(line[-1] if line else -1)
        line.append(segment)
    return AttentionMask.tree(ends, parents)


def prefix_mask(random: Random, length: int) -> AttentionMask:
    """Draws empty, partial and full prefixes."""
    documents = drawn_documents(random, length)
    sizes = [b - a for a, b in pairwise(documents)]
    return AttentionMask.prefix(documents, [random.choice((0, random.randint(0, size), size)) for size in sizes])


def chunked_mask(random: Random, length: int) -> AttentionMask:
    """Draws chunks of one token, of some, and of more than the sequence has."""
    size = random.choice((1, random.randint(1, 6), random.randint(1, length), length + random.randint(0, 5)))
    documents = drawn_documents(random, length) if random.random() < 0.5 else None
    mask = AttentionMask.chunked(size, documents, origin=random.choice(("document", "row")))
    return mask if random.random() < 0.8 else replace(mask, causal=False)


def span_mask(random: Random, length: int) -> AttentionMask:
    """Draws any number of image spans, from single tokens to full documents."""
    documents = drawn_documents(random, length)
    spans = list[range]()
    for start, end in pairwise(documents):
        ends = [start, *sorted({random.randint(start, end) for _ in range(random.choice((0, 1, 2, 4)))}), end]
        runs = [range(a, b) for a, b in pairwise(ends) if a < b]
        spans += [run for run in runs if random.random() < 0.6]
    random.shuffle(spans)
    return AttentionMask.image_spans(spans, documents if len(documents) > 2 or random.random() < 0.5 else None)


def block_mask(random: Random, length: int, keys: int | None = None) -> AttentionMask:
    """Draws a table of blocks of positions, of which the last is often shorter. Queries may see no key."""
    keys = length if keys is None else keys
    longest, often = max(length, keys), random.choice((0.2, 0.5, 0.9))
    block = random.choice((1, random.randint(1, 8), random.randint(1, longest), longest))
    rows, columns = (range(-(-tokens // block)) for tokens in (length, keys))
    visible = [[random.random() < often for _ in columns] for _ in rows]
    return AttentionMask.blocks(visible, block, random.choice((None, length)), causal=random.random() < 0.3)


def slice_mask(random: Random, length: int, keys: int | None = None) -> AttentionMask:
    """Draws disjoint slices: separate rectangles, and bands of one rectangle on both sides of diagonals."""
    # Cuts the rectangle of all pairs into `count` rectangles, and keeps about 70% of them.
    count = random.choice((1, 3, 8, 20))
    rectangles = [(range(length), range(length if keys is None else keys))]
    for _ in range(count - 1):
        rectangles += _halves(random, rectangles.pop(random.randrange(len(rectangles))))
    slices = [part for each in rectangles if random.random() < 0.7 for part in _bands(random, *each)]
    random.shuffle(slices)
    return AttentionMask.of_slices(slices or [Slice(range(length), range(1), None, None)])


def _halves(random: Random, rectangle: tuple[range, range]) -> list[tuple[range, range]]:
    """Halves a rectangle by queries or by keys, unless that side has one position."""
    side = random.randrange(2)
    cut_side, full_side = rectangle[side], rectangle[1 - side]
    if len(cut_side) < 2:
        return [rectangle]
    at = random.randrange(1, len(cut_side))
    halves = (cut_side[:at], cut_side[at:])
    return [(half, full_side) if side == 0 else (full_side, half) for half in halves]


def _bands(random: Random, queries: range, keys: range) -> list[Slice]:
    """Draws disjoint bands of one rectangle, between diagonals."""
    # key - query lies between `first` and `last`. Random values of it, in order, are the edges between bands.
    first, last = keys.start - queries.stop + 1, keys.stop - queries.start - 1
    lows = sorted(random.randint(first, last + 1) for _ in range(random.choice((0, 1, 1, 2))))
    edges = list(pairwise([None, *lows, None]))
    chosen = random.sample(edges, random.randint(1, len(edges)))
    bands = [(low, None if end is None else end - 1) for low, end in chosen]
    return [Slice(queries, keys, low, high) for low, high in bands if low is None or high is None or low <= high]


DRAWS: tuple[MaskDraw, ...] = (slice_mask, tree_mask, prefix_mask, chunked_mask, span_mask, block_mask)
"""Functions that draw each pattern that a single row can have."""


def _any_kind(random: Random) -> MaskDraw:
    return random.choice((plain_mask, *DRAWS))


def drawn_documents(random: Random, length: int) -> Sequence[int]:
    """Draws the boundaries of one to nine documents."""
    cuts = {random.randint(1, length - 1) for _ in range(random.randint(0, 8))} if length > 1 else set[int]()
    return [0, *sorted(cuts), length]


def _edge(random: Random, length: int) -> int | None:
    return random.choice((None, random.randint(0, 3), random.randint(0, length)))
