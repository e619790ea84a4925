"""`AttentionMask`: the keys that each query sees, in global positions. A value, not a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
import torch
from torch import Tensor

from armillary.attention.mask.blocks import Blocks
from armillary.attention.mask.chunked import Chunked, Origin
from armillary.attention.mask.content import Content, Documents
from armillary.attention.mask.image_spans import ImageSpans
from armillary.attention.mask.pattern import Ends, Pattern, RowPattern, integers, offsets, short_repr
from armillary.attention.mask.prefix import Prefix
from armillary.attention.mask.row_masks import RowMasks
from armillary.attention.mask.slice_list import Slice, SliceList
from armillary.attention.mask.tree import Tree
from armillary.core import Segments
from armillary.core.slices import Integers, Slices, band, count_pairs, document_slices, slice_array, within_band
from armillary.core.validation import Window, check_bool, documents_of, window_of

PATTERNS: dict[int, type[RowPattern]] = {
    pattern.code: pattern for pattern in (SliceList, Tree, Prefix, Chunked, ImageSpans, Blocks)
}
UNBOUNDED = -1  # a window's side of None as an integer


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMask:
    """A key at position j is visible to a query at position i if all conditions hold.

    Args:
        causal: `j <= i`.
        window: (left, right): `i - left <= j <= i + right`; None on a side is unbounded. Along the path in a tree.
        documents: boundaries (cu_seqlens: 0, end of the first, ..., N) of the packed documents; i and j must be in one
            document. One list for all rows of a batch, or a list of lists, one for each row.
        pattern: a further condition, of a mask made by one of the constructors below.
        content: `content` of another mask with the same documents and pattern, which are then not checked again.

    Sequences may be integer tensors or arrays; they are stored as tuples. Hashable, cheap to compare, independent of
    shards. In `dataclasses.replace(mask, window=...)` the window means the same as in the mask's constructor.

    Raises:
        ValueError: a window that is not two sides, each None or an integer of at least 0; boundaries that are not
            integers, do not start at 0, do not rise, or are given for some rows only; `causal` that is not a bool or
            contradicts the pattern; documents with a pattern that accepts none.
    """

    # FSDP2 rebuilds the dataclasses among a module's arguments at every call, field by field and number by number. So
    # values that may be long are not fields, but arguments that `replace` passes on unchanged.
    causal: bool = True
    window: Window | None = None
    if TYPE_CHECKING:
        documents: Documents | None = None
        pattern: Pattern | None = None
        content: Content = None  # pyright: ignore[reportAssignmentType] - set by __init__
    else:
        documents: InitVar[Documents | None] = None
        pattern: InitVar[Pattern | None] = None
        content: InitVar[Content | None] = None

    reference: ClassVar[str] = "armillary.attention.mask.attention_mask:AttentionMask"
    """Import path of the class, from which a compiled graph rebuilds a mask."""
    numbers: ClassVar[Tensor | None] = None
    """Documents and pattern as int64 [n] on the CPU; None without either.

    They are an input tensor of a compiled graph, so that another mask needs no other graph.
    """

    def __init__(
        self,
        causal: bool = True,
        window: Sequence[int | None] | None = None,
        documents: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
        pattern: Pattern | None = None,
        content: Content | None = None,
    ) -> None:
        # `replace` passes the content of the old mask, and often its documents and pattern too.
        if content is None or documents is not content.documents or pattern is not content.pattern:
            content = Content(documents_of(documents), pattern)
        values = (check_bool("causal", causal), window_of(window), content.documents, pattern, content, content.numbers)
        for name, value in zip(("causal", "window", "documents", "pattern", "content", "numbers"), values, strict=True):
            object.__setattr__(self, name, value)
        if pattern is None:
            return
        kind = type(pattern).__name__
        if not self.causal and pattern.says_causal:
            raise ValueError(f"causal=False for {kind}, which itself defines the visible later keys: leave it True")
        if self.causal and isinstance(pattern, RowMasks):
            raise ValueError("causal=True for rows of a batch; give each row a causal mask")
        if self.documents is not None and not pattern.takes_documents:
            raise ValueError(f"documents={short_repr(self.documents)} for {kind}, which takes none")
        if self.per_row and not isinstance(pattern, (Chunked, RowMasks)):
            raise ValueError(f"{kind} is of one row; AttentionMask.rows takes one mask for each row")

    # -- constructors -------------------------------------------------------------------------------------------------

    @classmethod
    def of_slices(cls, slices: Iterable[Slice]) -> AttentionMask:
        """Any mask: the query at i in a slice's queries sees the key at j in its keys iff low <= j - i <= high.

        Args:
            slices: `Slice(queries, keys, low, high)`: ranges of step 1, and a band with None for an unbounded side.

        Raises:
            ValueError: two slices that share a pair; the message has both slices and the pair.
        """
        return cls(causal=False, pattern=SliceList(slices))

    @classmethod
    def tree(
        cls, ends: Sequence[int], parents: Sequence[int], window: Sequence[int | None] | None = None
    ) -> AttentionMask:
        """Sequences with shared beginnings, such as answers to one prompt: each segment is stored once, depth first.

        A token sees its own segment causally, and the segments of its ancestors. `positions` are depths along the path.

        Args:
            ends: boundaries of segments, 0, end of the first, ..., N.
            parents: the parent of each segment s: s - 1, an ancestor of s - 1, or -1 for a root.
            window: (left, right) in tokens along the path.

        Raises:
            ValueError: boundaries that do not rise from 0, or parents off the path to the segment before.
        """
        return cls(window=window, pattern=Tree(ends, parents))

    @classmethod
    def prefix(cls, documents: Sequence[int], prefixes: Sequence[int]) -> AttentionMask:
        """Prefix language model: bidirectional among the first tokens of each document, causal after them.

        Args:
            prefixes: number of these first tokens in each document.

        Raises:
            ValueError: prefixes for another number of documents, or longer than their documents.
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
            origin: chunks start at each "document", or at the "row" as in transformers.
        """
        return cls(documents=documents, pattern=Chunked(size, origin))

    @classmethod
    def image_spans(
        cls,
        spans: Sequence[range],
        documents: Sequence[int] | None = None,
        window: Sequence[int | None] | None = None,
    ) -> AttentionMask:
        """Causal, but bidirectional within each span; then restricted to the window (Gemma 3's images).

        Args:
            spans: ranges of positions, disjoint, each within one document.
            window: (left, right); the right side has no effect, because later keys are visible within a span only.

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
        """A table of blocks of `block` tokens that see each other; with `causal`, no later keys.

        Args:
            visible: bool [n, n]; [n, m] for cross-attention.
            length: length of the sequence; the last block may be shorter. By default the length of the call.
        """
        return cls(causal=causal, pattern=Blocks(visible, block, length))

    @classmethod
    def rows(cls, masks: Iterable[AttentionMask]) -> AttentionMask:
        """One mask for each row of a batch. `replace(mask, window=...)` narrows each."""
        return cls(causal=False, pattern=RowMasks(tuple(masks)))

    # -- as a value ---------------------------------------------------------------------------------------------------

    def __hash__(self) -> int:
        return hash((*self.sides, self.content.hash))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, AttentionMask):
            return NotImplemented
        # Cached hashes are compared first, so that long documents are compared only if they are probably equal.
        if (self.causal, self.window, self.content.hash) != (other.causal, other.window, other.content.hash):
            return False
        return self.content is other.content or (self.documents, self.pattern) == (other.documents, other.pattern)

    def __repr__(self) -> str:
        fields = {"causal": self.causal, "window": self.window, "documents": self.documents, "pattern": self.pattern}
        return f"{type(self).__name__}({', '.join(f'{name}={short_repr(value)}' for name, value in fields.items())})"

    def narrow(self, left: int | None) -> Self:
        """Returns the mask with at most `left` keys before each query; itself if its window is no wider."""
        before, after = self.window or (None, None)
        if left is None or (before is not None and before <= left):
            return self
        narrowed = object.__new__(type(self))  # torch.compile can trace this, and nothing is checked again
        for name, value in vars(self).items():
            object.__setattr__(narrowed, name, value)
        object.__setattr__(narrowed, "window", (left, after))
        return narrowed

    # -- in a compiled graph ------------------------------------------------------------------------------------------

    @property
    def sides(self) -> tuple[int, int, int]:
        """`causal` and the two sides of the window as integers: all of the mask besides `numbers`."""
        before, after = self.window or (None, None)
        return int(self.causal), UNBOUNDED if before is None else before, UNBOUNDED if after is None else after

    @property
    def encoded(self) -> Integers:
        """The whole mask as integers: `sides`, followed by `numbers`."""
        return _encode(self.sides, self.numbers)

    @classmethod
    def read(cls, sides: Sequence[int], numbers: Tensor | None) -> AttentionMask:
        """Returns the mask with these `sides` and `numbers`: one object for all layers of a step, which caches need."""
        return _read_mask(_encode(sides, numbers).tobytes())

    @classmethod
    def _decode(cls, encoded: Sequence[int]) -> AttentionMask:
        causal, before, after, code, row_count, *numbers_left = encoded
        window = (None if before == UNBOUNDED else before, None if after == UNBOUNDED else after)
        documents: list[Any] = []
        for _ in range(abs(row_count)):
            count, *numbers_left = numbers_left
            documents.append(numbers_left[:count])
            numbers_left = numbers_left[count:]
        boundaries = None if row_count == 0 else documents if row_count > 0 else documents[0]
        pattern: Pattern | None = None
        if code == RowMasks.code:
            masks = list[AttentionMask]()
            while numbers_left:  # each row: its length, then its mask as `encoded`
                size, *numbers_left = numbers_left
                masks.append(cls._decode(numbers_left[:size]))
                numbers_left = numbers_left[size:]
            pattern = RowMasks(masks)
        elif code:
            pattern = PATTERNS[code].of_numbers(numbers_left)
        return cls(bool(causal), window, boundaries, pattern)

    # -- rows of a batch ----------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int | None:
        """Number of rows with masks of their own; None if all rows have one mask."""
        if isinstance(self.pattern, RowMasks):
            return len(self.pattern.masks)
        documents = self.documents
        return len(documents) if documents and isinstance(documents[0], tuple) else None

    @property
    def per_row(self) -> bool:
        """True if the rows of a batch have masks of their own."""
        return self.batch is not None

    def row(self, row: int) -> Self:
        """Returns the mask of one row of the batch."""
        if isinstance(self.pattern, RowMasks):
            mask: Self = self.pattern.masks[row]
            return mask if self.window is None else mask._intersect(self.window)
        if not self.per_row:
            return self
        return type(self)(self.causal, self.window, self.boundaries(row), self.pattern)

    def _intersect(self, window: Window) -> Self:
        """Returns the mask with the intersection of its window and another."""
        sides = zip(self.window or (None, None), window, strict=True)
        smallest = [min((side for side in pair if side is not None), default=None) for pair in sides]
        return type(self)(self.causal, smallest, self.documents, self.pattern, self.content)

    def boundaries(self, row: int = 0) -> Ends:
        """Returns the document boundaries of one row of the batch, or None without documents."""
        if isinstance(self.pattern, RowMasks):
            return self.pattern.masks[row].boundaries()
        documents = cast(Any, self.documents)
        return documents[row] if self.per_row else documents

    @property
    def _row_pattern(self) -> RowPattern | None:
        """The pattern of a mask of one row."""
        return cast("RowPattern | None", self.pattern)

    # -- for a sequence -----------------------------------------------------------------------------------------------

    def check(self, queries: int, keys: int, batch: int) -> None:
        """Raises ValueError if the mask does not fit `batch` rows of `queries` queries and `keys` keys."""
        if self.batch not in (None, batch):
            kind = "masks" if isinstance(self.pattern, RowMasks) else "documents"
            raise ValueError(f"the mask has {kind} for {self.batch} rows; the batch has {batch}")
        for row in range(self.batch or 1):
            self._check_row(row, queries, keys)

    def _check_row(self, row: int, queries: int, keys: int) -> None:
        mask = self.row(row)
        ends = mask.boundaries()
        for length in (queries, keys):
            if ends is not None and ends[-1] != length:
                raise ValueError(f"the documents of row {row} end at {ends[-1]}; the sequence has {length} tokens")
        if (pattern := mask._row_pattern) is not None:
            pattern.check(ends, queries, keys)

    def slices(self, length: int, keys: int | None = None) -> list[Slices]:
        """Returns the visible pairs as disjoint slices (`core.slices`), one array for each row of the batch or for all.

        Args:
            keys: number of keys, if it is not `length`.

        Raises:
            ValueError: a sequence that the mask does not fit.
        """
        keys, rows = length if keys is None else keys, range(self.batch or 1)
        for row in rows:
            self._check_row(row, length, keys)
        return [self.row(row)._slices(length, keys) for row in rows]

    def slices_up_to(self, length: int) -> Slices:
        """Returns the slices of a mask of one row, for positions below `length` of a sequence of any length."""
        ends = self.boundaries()
        if ends is None and isinstance(self.pattern, Tree):
            ends = self.pattern.ends
        own_length = ends[-1] if ends else self.pattern.length if isinstance(self.pattern, Blocks) else None
        length = max(length, own_length or 0)
        return self._slices(length, length)

    def _slices(self, queries: int, keys: int) -> Slices:
        ends, pattern, bounds = self.boundaries(), self._row_pattern, band(self.causal, self.window)
        if pattern is None and ends is None:
            return slice_array([(0, queries, 0, keys, *bounds)])
        if pattern is None:
            return document_slices(ends or (), *bounds)
        # The pattern may define causality or the window itself; `bounds` are the other conditions.
        slices = pattern.slices(ends, self.window, queries, keys)
        return within_band(slices, *pattern.bounds(self.causal, self.window))

    def positions(self, length: int, row: int = 0) -> Tensor:
        """Returns positions for RoPE, a LongTensor [N]: depths along the path in trees, else offsets in documents."""
        self._check_row(row, length, length)
        mask = self.row(row)
        ends, pattern = mask.boundaries(), mask._row_pattern
        return torch.from_numpy(offsets(ends, length) if pattern is None else pattern.positions(ends, length))

    def segments(self, length: int) -> list[Segments]:
        """Returns the segments along which layers with a state run: per row with its own mask, or once for all rows.

        Raises:
            ValueError: a mask that is neither causal, of causal documents, nor a tree; a mask with a window, which a
                state does not have; a sequence that the mask does not fit.
        """
        rows = [self.row(row) for row in range(self.batch or 1)]
        for number, mask in enumerate(rows):
            self._check_row(number, length, length)
            if not mask.causal or mask.window is not None or not isinstance(mask.pattern, Tree | None):
                raise ValueError(
                    f"mask {mask!r}: a layer with a state takes causal documents or trees without a window"
                )
        return [
            mask.pattern.segments
            if isinstance(mask.pattern, Tree)
            else Segments.documents(mask.boundaries() or (0, length))
            for mask in rows
        ]

    def pairs(self, length: int, row: int = 0) -> int:
        """Returns the number of visible (query, key) pairs of a sequence of `length` tokens, in closed form.

        Raises:
            ValueError: a sequence that the mask of that row does not fit.
        """
        self._check_row(row, length, length)
        return count_pairs(self.row(row)._slices(length, length))

    def visible(self, queries: Tensor, keys: Tensor, row: int = 0) -> Tensor:
        """Returns bool [T, S]: True if a key position [S] is visible to a query position [T]. Dense, for few tokens."""
        length = 1 + max(int(x.max()) if x.numel() else 0 for x in (queries, keys))
        visible = torch.zeros(len(queries), len(keys), dtype=torch.bool, device=queries.device)
        i, j = queries[:, None], keys[None, :]
        for q0, q1, k0, k1, low, high in self.row(row).slices_up_to(length).tolist():
            visible |= (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (low <= j - i) & (j - i <= high)
        return visible


def _encode(sides: Sequence[int], numbers: Tensor | None) -> Integers:
    return integers(sides, (0, 0) if numbers is None else numbers)


@lru_cache(maxsize=16)
def _read_mask(encoded: bytes) -> AttentionMask:
    return AttentionMask._decode(np.frombuffer(encoded, dtype=np.int64).tolist())  # pyright: ignore[reportPrivateUsage]
