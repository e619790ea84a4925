"""Who sees whom, pair by pair, as each kind of mask is defined: the oracle's own rule.

It reads what a mask was made of and shares nothing with what finds slices, tiles and counts of pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from armillary.attention.mask import AttentionMask, Blocks, Chunked, ImageSpans, Prefix, RowMasks, SliceList, Tree

Boundaries = tuple[int, ...]


def visible_pairs(mask: AttentionMask, query_positions: Tensor, key_positions: Tensor, batch: int = 1) -> Tensor:
    """Who sees whom: bool [1, T, S], or [B, T, S] where the rows of the batch have masks of their own.

    Args:
        query_positions: [T], global.
        key_positions: [S], likewise.
        batch: how many rows there are.

    Raises:
        ValueError: masks or documents of another number of rows; positions after the end of what the mask is for.
    """
    i, j = query_positions[:, None], key_positions[None, :]
    rows = range(_rows(mask, batch))
    return torch.stack([_seen(mask, i, j, row).expand(i.shape[0], j.shape[1]) for row in rows])


def _rows(mask: AttentionMask, batch: int) -> int:
    """How many rows have masks of their own; 1 where all are alike."""
    if isinstance(mask.pattern, RowMasks):
        own, what = len(mask.pattern.masks), "masks"
    elif mask.documents and isinstance(mask.documents[0], tuple):
        own, what = len(mask.documents), "documents"
    else:
        return 1
    if own != batch:
        raise ValueError(f"the mask has {what} for {own} rows; the batch has {batch}")
    return own


def _seen(mask: AttentionMask, i: Tensor, j: Tensor, row: int) -> Tensor:
    """Which keys at j [1, S] the queries at i [T, 1] see in one row: bool, broadcast to [T, S]."""
    if isinstance(mask.pattern, RowMasks):
        inner = mask.pattern.masks[row]
        seen, apart = _seen(inner, i, j, 0), _apart(inner, i, j)
    else:
        seen, apart = _by_pattern(mask, i, j, _documents(mask, row)), _apart(mask, i, j)
    left, right = mask.window or (None, None)
    if mask.causal and not isinstance(mask.pattern, (Prefix, ImageSpans)):
        seen = seen & (j <= i)
    if left is not None:
        seen = seen & (apart <= left)
    if right is not None and not _spans_images(mask, row):
        seen = seen & (-apart <= right)
    return seen


def _spans_images(mask: AttentionMask, row: int) -> bool:
    """Whether windows cut on the left alone."""
    pattern = mask.pattern
    return isinstance(pattern.masks[row].pattern if isinstance(pattern, RowMasks) else pattern, ImageSpans)


def _by_pattern(mask: AttentionMask, i: Tensor, j: Tensor, documents: Boundaries | None) -> Tensor:
    """Who sees whom before the window cuts it, and `causal` where that is no part of what the kind means."""
    together = _place(i, documents)[0] == _place(j, documents)[0]
    match mask.pattern:
        case SliceList(bands=slices):
            return _any(i, j, [_in(i, s.queries) & _in(j, s.keys) & _band(j - i, s.low, s.high) for s in slices])
        case Tree(ends=ends, parents=parents):
            line = _lines(parents)
            (segment, _), (other, _) = _place(i, ends), _place(j, ends)
            on_path = torch.tensor([[b in line[a] for b in range(len(parents))] for a in range(len(parents))])
            return on_path.to(i.device)[segment, other]
        case Prefix(prefixes=prefixes):
            return together & ((j <= i) | (_in_prefix(i, documents, prefixes) & _in_prefix(j, documents, prefixes)))
        case Chunked(size=size, origin=origin):
            first, second = (x if origin == "row" else _place(x, documents)[1] for x in (i, j))
            return together & (first // size == second // size)
        case ImageSpans(spans=spans):
            return together & ((j <= i) | _any(i, j, [_in(i, span) & _in(j, span) for span in spans]))
        case Blocks(visible=visible, block=block):
            _check_within(i, block * len(visible))
            _check_within(j, block * len(visible[0]))
            return torch.tensor(visible, device=i.device)[i // block, j // block]
        case _:
            return together


def _apart(mask: AttentionMask, i: Tensor, j: Tensor) -> Tensor:
    """How many tokens a query comes after a key: along the path in a tree, by position otherwise."""
    if isinstance(mask.pattern, Tree):
        return _depth(i, mask.pattern) - _depth(j, mask.pattern)
    return i - j


def _lines(parents: tuple[int, ...]) -> list[list[int]]:
    """For each segment of a tree, itself and all its ancestors, nearest first."""
    found = list[list[int]]()
    for segment in range(len(parents)):
        line = [segment]
        while parents[line[-1]] >= 0:
            line.append(parents[line[-1]])
        found.append(line)
    return found


def _depth(x: Tensor, tree: Tree) -> Tensor:
    """How many tokens lie before each position on its path from the root."""
    sizes = [end - start for start, end in zip(tree.ends, tree.ends[1:], strict=False)]
    above = [sum(sizes[ancestor] for ancestor in line[1:]) for line in _lines(tree.parents)]
    segment, offset = _place(x, tree.ends)
    return torch.tensor(above, device=x.device)[segment] + offset


def _documents(mask: AttentionMask, row: int) -> Boundaries | None:
    """The document boundaries of one row."""
    found = mask.documents
    return found[row] if found and isinstance(found[0], tuple) else found  # pyright: ignore[reportReturnType]


def _place(x: Tensor, boundaries: Boundaries | None) -> tuple[Tensor, Tensor]:
    """The number of the document (or segment) that each position lies in, and its offset there."""
    if boundaries is None:
        return torch.zeros_like(x), x
    _check_within(x, boundaries[-1])
    number = torch.zeros_like(x)
    for start in boundaries[1:-1]:
        number = number + (x >= start)
    return number, x - torch.tensor(boundaries, device=x.device)[number]


def _check_within(x: Tensor, end: int) -> None:
    if x.numel() and int(x.max()) >= end:
        raise ValueError(f"position {int(x.max())} lies in no document: the last one ends at {end}")


def _in_prefix(x: Tensor, documents: Boundaries | None, prefixes: tuple[int, ...]) -> Tensor:
    document, offset = _place(x, documents)
    return offset < torch.tensor(prefixes, device=x.device)[document]


def _in(x: Tensor, run: range) -> Tensor:
    return (x >= run.start) & (x < run.stop)


def _band(offset: Tensor, low: int | None, high: int | None) -> Tensor:
    above = torch.ones_like(offset, dtype=torch.bool) if low is None else offset >= low
    return above if high is None else above & (offset <= high)


def _any(i: Tensor, j: Tensor, parts: list[Tensor]) -> Tensor:
    found = torch.zeros_like(i - j, dtype=torch.bool)
    for part in parts:
        found = found | part
    return found
