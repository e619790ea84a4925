"""A mask from the integers that a compiled graph takes for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from armillary.attention.mask.attention_mask import AttentionMask
from armillary.attention.mask.blocks import Blocks
from armillary.attention.mask.chunked import Chunked
from armillary.attention.mask.image_spans import ImageSpans
from armillary.attention.mask.pattern import RowPattern
from armillary.attention.mask.prefix import Prefix
from armillary.attention.mask.row_masks import RowMasks
from armillary.attention.mask.slice_list import SliceList
from armillary.attention.mask.tree import Tree
from armillary.core.checked import Window

PATTERNS: dict[int, type[RowPattern]] = {
    kind.code: kind for kind in (SliceList, Tree, Prefix, Chunked, ImageSpans, Blocks)
}


def mask_of_numbers(causal: bool, window: Window | None, numbers: Sequence[int]) -> AttentionMask:
    """The mask whose `numbers` these are, as `content.listed` puts them."""
    code, rows, *rest = numbers
    documents: list[Any] = []
    for _ in range(abs(rows)):
        count, *rest = rest
        documents.append(rest[:count])
        rest = rest[count:]
    pattern = _rows_of(rest) if code == RowMasks.code else PATTERNS[code].of_numbers(rest) if code else None
    return AttentionMask(causal, window, (documents if rows > 0 else documents[0]) if rows else None, pattern)


def _rows_of(numbers: Sequence[int]) -> RowMasks:
    masks = list[AttentionMask]()
    while numbers:
        causal, *sides = numbers[1:4]
        window = cast(Window, tuple(None if side == -1 else side for side in sides))
        masks.append(mask_of_numbers(bool(causal), window, numbers[4 : 1 + numbers[0]]))
        numbers = numbers[1 + numbers[0] :]
    return RowMasks(masks)
