"""Masks of every kind at random: about half of them causal, windows and documents, the others of all other kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

from armillary.attention.mask import AttentionMask, RowMasks, Slice

MaskDraw = Callable[[Random, int], AttentionMask]
"""A mask for a sequence of so many tokens."""


def drawn_mask(random: Random, length: int, keys: int, batch: int) -> AttentionMask:
    """Any mask that `length` queries and `keys` keys can have.

    Args:
        batch: how many rows may have masks of their own; none if 0.
    """
    if random.random() < 0.5:
        return plain_mask(random, length, batch, documents=keys == length and random.random() < 0.4)
    if keys != length:
        return cut(random, random.choice((slice_mask, block_mask))(random, length, keys), length)
    if batch and random.random() < 0.2:
        return cut(random, row_masks(random, length, batch), length)
    return cut(random, random.choice(DRAWS)(random, length), length)


def plain_mask(random: Random, length: int, batch: int = 0, *, documents: bool = True) -> AttentionMask:
    """Causal or not, a window, documents. Documents of their own only for rows of a batch of so many."""
    window = tuple(_edge(random, length) for _ in range(2)) if random.random() < 0.4 else None
    rows = [drawn_documents(random, length) for _ in range(batch or 1)] if documents else None
    together = rows is not None and (not batch or random.random() < 0.5)
    return AttentionMask(random.random() < 0.6, window, rows[0] if rows and together else rows)


def row_masks(random: Random, length: int, batch: int) -> AttentionMask:
    """Of any kind in each row, often of different ones."""
    return AttentionMask.rows([cut(random, _any_kind(random)(random, length), length) for _ in range(batch)])


def cut(random: Random, mask: AttentionMask, length: int) -> AttentionMask:
    """The mask with a window besides, or causal besides, now and then. Rows that differ are causal each for itself."""
    causal = mask.causal or (random.random() < 0.2 and not isinstance(mask.pattern, RowMasks))
    window = (_edge(random, length), _edge(random, length)) if random.random() < 0.3 else mask.window
    return replace(mask, causal=causal, window=window)


def tree_mask(random: Random, length: int) -> AttentionMask:
    """A chain, children of one root, a forest, or anything; of one segment to one for each token or so."""
    cuts = {random.randint(1, length - 1) for _ in range(random.choice((0, 2, 5, 12, length)))} if length > 1 else set()
    ends = [0, *sorted(cuts), length]
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
    """Prefixes of nothing, of some of a document, and of all of it."""
    documents = drawn_documents(random, length)
    sizes = [b - a for a, b in pairwise(documents)]
    return AttentionMask.prefix(documents, [random.choice((0, random.randint(0, size), size)) for size in sizes])


def chunked_mask(random: Random, length: int) -> AttentionMask:
    """Chunks of one token, of some, and of more than there are."""
    size = random.choice((1, random.randint(1, 6), random.randint(1, length), length + random.randint(0, 5)))
    documents = drawn_documents(random, length) if random.random() < 0.5 else None
    mask = AttentionMask.chunked(size, documents, origin=random.choice(("document", "row")))
    return mask if random.random() < 0.8 else replace(mask, causal=False)


def span_mask(random: Random, length: int) -> AttentionMask:
    """Runs of tokens, none to many of them, some of one token and some of a whole document."""
    documents = drawn_documents(random, length)
    spans = list[range]()
    for start, end in pairwise(documents):
        ends = [start, *sorted({random.randint(start, end) for _ in range(random.choice((0, 1, 2, 4)))}), end]
        runs = [range(a, b) for a, b in pairwise(ends) if a < b]
        spans += [run for run in runs if random.random() < 0.6]
    random.shuffle(spans)
    return AttentionMask.image_spans(spans, documents if len(documents) > 2 or random.random() < 0.5 else None)


def block_mask(random: Random, length: int, keys: int | None = None) -> AttentionMask:
    """Blocks of tokens, the last one often shorter, each visible or not; whole rows of them may see nothing."""
    keys = length if keys is None else keys
    longest, often = max(length, keys), random.choice((0.2, 0.5, 0.9))
    block = random.choice((1, random.randint(1, 8), random.randint(1, longest), longest))
    rows, columns = (range(-(-tokens // block)) for tokens in (length, keys))
    visible = [[random.random() < often for _ in columns] for _ in rows]
    return AttentionMask.blocks(visible, block, random.choice((None, length)), causal=random.random() < 0.3)


def slice_mask(random: Random, length: int, keys: int | None = None) -> AttentionMask:
    """Disjoint slices: rectangles that share no pair, or parts of one rectangle on both sides of a diagonal."""
    count = random.choice((1, 3, 8, 20))
    rectangles = [(range(length), range(length if keys is None else keys))]
    for _ in range(count - 1):
        rectangles += _halves(random, rectangles.pop(random.randrange(len(rectangles))))
    slices = [part for each in rectangles if random.random() < 0.7 for part in _bands(random, *each)]
    random.shuffle(slices)
    return AttentionMask.of_slices(slices or [Slice(range(length), range(1), None, None)])


def _halves(random: Random, rectangle: tuple[range, range]) -> list[tuple[range, range]]:
    """A rectangle in two, by queries or by keys; as it is where there is nothing to cut."""
    side = random.randrange(2)
    whole, other = rectangle[side], rectangle[1 - side]
    if len(whole) < 2:
        return [rectangle]
    at = random.randrange(1, len(whole))
    return [(half, other) if side == 0 else (other, half) for half in (whole[:at], whole[at:])]


def _bands(random: Random, queries: range, keys: range) -> list[Slice]:
    """Bands of one rectangle that share no pair: all of it, one or two of what diagonals cut it into."""
    first, last = keys.start - queries.stop + 1, keys.stop - queries.start - 1
    lows = sorted(random.randint(first, last + 1) for _ in range(random.choice((0, 1, 1, 2))))
    edges = list(pairwise([None, *lows, None]))
    kept = random.sample(edges, random.randint(1, len(edges)))
    bands = [(low, None if end is None else end - 1) for low, end in kept]
    return [Slice(queries, keys, low, high) for low, high in bands if low is None or high is None or low <= high]


DRAWS: tuple[MaskDraw, ...] = (slice_mask, tree_mask, prefix_mask, chunked_mask, span_mask, block_mask)
"""Of each kind. Rows of these and of plain masks are one more."""


def _any_kind(random: Random) -> MaskDraw:
    return random.choice((plain_mask, *DRAWS))


def drawn_documents(random: Random, length: int) -> Sequence[int]:
    """Boundaries of one document to nine."""
    cuts = {random.randint(1, length - 1) for _ in range(random.randint(0, 8))} if length > 1 else set[int]()
    return [0, *sorted(cuts), length]


def _edge(random: Random, length: int) -> int | None:
    return random.choice((None, random.randint(0, 3), random.randint(0, length)))
