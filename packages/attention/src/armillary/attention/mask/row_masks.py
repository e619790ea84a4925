"""`RowMasks`: one mask per row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from armillary.attention.mask.pattern import Pattern, integers
from armillary.core.parts import Integers


class RowMasks(Pattern):
    """One mask for each row of a batch.

    Args:
        masks: an `AttentionMask` for each row.

    Raises:
        ValueError: no masks, or an element that is not a mask of one row.
    """

    code = 7

    def __init__(self, masks: Sequence[Any]) -> None:
        self.masks = tuple(masks)
        if not self.masks:
            raise ValueError("no masks; one for each row of the batch is needed")
        for row, mask in enumerate(self.masks):
            if getattr(mask, "per_row", True):
                raise ValueError(f"the mask of row {row} is {mask!r}; an AttentionMask of one row is needed")

    @cached_property
    def numbers(self) -> Integers:
        # The encoding of each mask follows its length.
        return integers(*(row_numbers for mask in self.masks for row_numbers in ((len(mask.encoded),), mask.encoded)))
