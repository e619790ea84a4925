"""Layouts by name, and the layout that a call was given, checked against what this rank holds."""

from __future__ import annotations

from armillary.attention.mask import AttentionMask
from armillary.core import SequenceLayout


def layout_of(kind: str, length: int, shards: int, mask: AttentionMask | None = None) -> SequenceLayout:
    """The layout of a name that people type.

    Args:
        mask: what a balanced layout is balanced for; by default, causal.

    Raises:
        ValueError: no such name, or a mask of another type.
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
            return SequenceLayout.balanced(length, shards, mask=mask or AttentionMask())
        case _:
            raise ValueError(f"no layout {kind!r}; known: zigzag, contiguous, striped, balanced")


def sequence_layout(
    layout: SequenceLayout | None, tokens: int, shard: int, shards: int, sequence_shards: int
) -> SequenceLayout:
    """The layout over the sequence axis.

    Args:
        layout: over all ranks of a method, or over its sequence axis alone; None where there is one shard.
        tokens: that this rank has passed.
        shard, shards, sequence_shards: as of `Method`.

    Raises:
        ValueError: none is given for several shards; it is over another number of ranks; or this rank's shard has
            another number of tokens.
    """
    if layout is None:
        if shards > 1:
            raise ValueError(f"{shards} ranks hold the sequence; pass layout=, such as attend.layout(length)")
        layout = SequenceLayout.contiguous(tokens, 1)
    if layout.shards not in (shards, sequence_shards):
        wanted = " or ".join(str(n) for n in sorted({shards, sequence_shards}))
        raise ValueError(f"the layout has {layout.shards} shards; this method needs one over {wanted}")
    within = shards // sequence_shards
    coarse = layout.coarsen(within) if layout.shards == shards else layout
    fine = coarse.refine(within)
    if layout.shards == shards and fine.sizes != layout.sizes:
        raise ValueError(f"{layout} is not what attend.layout gives: refine a layout over {sequence_shards}")
    if tokens != fine.sizes[shard]:
        raise ValueError(
            f"shard {shard} of {coarse} has {fine.sizes[shard]} tokens; this rank passed {tokens}. Tensors are [batch, "
            f"tokens, heads, head dim]: transpose(1, 2) makes them of [batch, heads, tokens, head dim]"
        )
    return coarse
