"""Sequence layouts by name."""

from __future__ import annotations

from armillary.attention.mask.attention_mask import AttentionMask
from armillary.core import SequenceLayout
from armillary.core.parts import Side


def layout_of(
    kind: str, length: int, shards: int, mask: AttentionMask | None = None, balanced_by: Side | None = "queries"
) -> SequenceLayout:
    """Returns a layout of kind "zigzag", "contiguous", "striped" or "balanced".

    Args:
        mask: the mask under which a balanced layout has even work; causal by default.
        balanced_by: the side whose work a balanced layout makes even, as in `SequenceLayout.balanced`. None: both
            sides, and bytes are ignored (`send_cost=0`).

    Raises:
        ValueError: another kind, a mask of another type, or as the layout's constructor.
    """
    if mask is not None and not isinstance(mask, AttentionMask):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"mask is a {type(mask).__name__}; an AttentionMask is needed, or None for a causal one")
    match kind:
        case "zigzag":
            return SequenceLayout.zigzag(length, shards)
        case "contiguous":
            return SequenceLayout.contiguous(length, shards)
        case "striped":
            return SequenceLayout.striped(length, shards)
        case "balanced":
            mask = mask or AttentionMask()
            if balanced_by is None:
                return SequenceLayout.balanced(length, shards, mask=mask, send_cost=0)
            return SequenceLayout.balanced(length, shards, mask=mask, balanced_by=balanced_by)
        case _:
            raise ValueError(f"no layout {kind!r}; known: zigzag, contiguous, striped, balanced")
