"""Which keys a query sees, in global positions: a value, not a tensor. One class; its kinds are constructors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from armillary.attention.mask.blocks import Blocks
from armillary.attention.mask.chunked import Chunked, Origin
from armillary.attention.mask.image_spans import ImageSpans
from armillary.attention.mask.prefix import Prefix
from armillary.attention.mask.row_masks import RowMasks
from armillary.attention.mask.slice_list import Slice, SliceList
from armillary.attention.mask.tree import Tree
from armillary.attention.mask.value import MaskValue


class AttentionMask(MaskValue):
    """A key at position j is visible to a query at position i if all that is asked for here holds.

    Args:
        causal: `j <= i`.
        window: (left, right): `i - left <= j <= i + right`; None on a side is unbounded. Along the path in a tree.
        documents: boundaries (cu_seqlens: 0, end of the first, ..., N) of the documents that the sequence is packed
            from; i and j must lie in one document. One list for all rows of a batch, or a list of lists, one for each
            row.
        pattern: what more decides, where one of the constructors below has made the mask.
        content: of another mask with these very documents and this pattern, which are not looked into again.

    Sequences may be integer tensors or arrays; kept as tuples. Hashable; cheap to compare; knows nothing of shards.
    `dataclasses.replace(mask, window=...)` does for each kind what a window means there.

    Raises:
        ValueError: a window that is not two sides, each None or an integer of at least 0; boundaries that are no
            integers, do not start at 0 or do not rise, or are of some rows only; causal neither True nor False, or not
            as the pattern has it; documents beside a pattern that knows none.
    """

    @classmethod
    def of_slices(cls, slices: Iterable[Slice]) -> AttentionMask:
        """Any mask: the query at i in a slice's queries sees the key at j in its keys iff low <= j - i <= high.

        Args:
            slices: `Slice(queries, keys, low, high)`, ranges of step 1 and a band, None where it is not bounded.

        Raises:
            ValueError: slices of which two share a pair, with both and the pair.
        """
        return cls(causal=False, pattern=SliceList(slices))

    @classmethod
    def tree(
        cls, ends: Sequence[int], parents: Sequence[int], window: Sequence[int | None] | None = None
    ) -> AttentionMask:
        """Sequences that share beginnings, such as answers to one prompt, packed segment by segment, depth first.

        A token sees its own segment causally, and the segments of its ancestors. `positions` are depths along the path.

        Args:
            ends: boundaries of segments, 0, end of the first, ..., N.
            parents: for each segment s - 1, an ancestor of s - 1, or -1 for a root.
            window: (left, right) in tokens along the path.

        Raises:
            ValueError: boundaries that do not rise from 0, or parents off the path to the segment before.
        """
        return cls(window=window, pattern=Tree(ends, parents))

    @classmethod
    def prefix(cls, documents: Sequence[int], prefixes: Sequence[int]) -> AttentionMask:
        """Prefix language model: the first tokens of each document see each other both ways, the rest is causal.

        Args:
            prefixes: how many tokens of each document.

        Raises:
            ValueError: prefixes of other documents, or longer than theirs.
        """
        mask = cls(documents=documents, pattern=Prefix(prefixes))
        cast(Prefix, mask.pattern).check(mask.boundaries(), 0, 0)
        return mask

    @classmethod
    def chunked(
        cls,
        size: int,
        documents: Sequence[int] | Sequence[Sequence[int]] | None = None,
        origin: Origin = "document",
    ) -> AttentionMask:
        """Causal within chunks of `size` positions (Llama 4).

        Args:
            origin: chunks are counted from each "document"'s start, or from the "row"'s, as transformers counts.
        """
        return cls(documents=documents, pattern=Chunked(size, origin))

    @classmethod
    def image_spans(
        cls,
        spans: Sequence[range],
        documents: Sequence[int] | None = None,
        window: Sequence[int | None] | None = None,
    ) -> AttentionMask:
        """Causal or in one span, and then what the window leaves (Gemma 3's images).

        Args:
            spans: ranges of positions, disjoint, each within one document.
            window: (left, right), of which the left side cuts; what is later is hidden by being causal alone.

        Raises:
            ValueError: spans that overlap, or reach beyond their document.
        """
        mask = cls(window=window, documents=documents, pattern=ImageSpans(spans))
        ends = mask.boundaries()
        if ends is not None:
            cast(ImageSpans, mask.pattern).check(ends, ends[-1], ends[-1])
        return mask

    @classmethod
    def blocks(cls, visible: Any, block: int, length: int | None = None, causal: bool = False) -> AttentionMask:
        """Blocks of `block` tokens see each other as a table says; with `causal`, no later keys.

        Args:
            visible: bool [n, n]; [n, m] for cross-attention.
            length: of the sequence, whose last block may be shorter; as the call has it unless given.
        """
        return cls(causal=causal, pattern=Blocks(visible, block, length))

    @classmethod
    def rows(cls, masks: Iterable[AttentionMask]) -> AttentionMask:
        """One mask for each row of a batch. A window that is asked for later narrows each."""
        return cls(causal=False, pattern=RowMasks(tuple(masks)))
