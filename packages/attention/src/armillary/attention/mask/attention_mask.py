"""`AttentionMask`: which keys each query sees, in global positions. An immutable value instead of an [N, N] tensor.

Below it: its documents and pattern with their encoding, the cache of values derived from masks, and layouts that are
balanced under a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from armillary.attention.mask.patterns import (
    Chunked,
    Ends,
    ImageSpans,
    Origin,
    Pattern,
    Prefix,
    RowMasks,
    RowPattern,
    integers,
    offsets,
    short_repr,
)
from armillary.attention.mask.slices_trees_blocks import Blocks, Slice, SliceList, Tree
from armillary.core import Segments, SequenceLayout
from armillary.core.internal import (
    Integers,
    Side,
    Slices,
    Window,
    band,
    check_bool,
    check_tensor,
    count_pairs,
    document_slices,
    documents_of,
    slice_array,
    window_of,
    within_band,
)

Documents = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""Boundaries of documents (0, end of the first, ..., N): one tuple for all rows, or a tuple of one for each row."""
PATTERNS: dict[int, type[RowPattern]] = {
    pattern.code: pattern for pattern in (SliceList, Tree, Prefix, Chunked, ImageSpans, Blocks)
}
UNBOUNDED = -1
"""Encodes None, an unbounded side of a window, as an integer."""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMask:
    """The query at position i sees the key at position j if the conditions of all arguments hold.

    Args:
        causal: True: `j <= i`, unless the pattern itself defines visible later keys. False: no condition.
        window: (left, right): `i - left <= j <= i + right`. A side of None is unbounded. In a tree, the sides count
            tokens along the path.
        documents: boundaries (cu_seqlens: 0, end of the first, ..., N) of the packed documents; i and j must be in one
            document. One list for all rows of a batch, or a list of lists, one for each row. In a tensor, a repeated
            boundary, with which libraries pad cu_seqlens, is an empty document and left out.
        pattern: a further condition: a tree, a prefix, chunks, ... The constructors below make masks with patterns.
        content: `content` of another mask with the same documents and pattern, which are then not checked again.

    Sequences may be integer tensors or arrays; they are stored as tuples. Masks are hashable, cheap to compare and do
    not depend on shards. `dataclasses.replace(mask, window=...)` works for masks of all constructors.

    Raises:
        ValueError: a window that is not two sides, each None or an integer of at least 0; boundaries that are not
            integers, do not start at 0, fall, or are given for some rows only; `causal` that is not a bool or
            contradicts the pattern; documents, or documents of several rows, beside a pattern that accepts none.
    """

    # FSDP2 rebuilds every dataclass among a module's arguments at each call, and visits all numbers in its fields. So
    # documents and pattern, which may be long, are no fields. As InitVars, `replace` still passes them on.
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
    """Import path of the class: a compiled graph imports it to rebuild a mask."""
    numbers: ClassVar[Tensor | None] = None
    """Documents and pattern encoded as int64 [n] on the CPU; None without either.

    A compiled graph gets them as an input tensor, so that other documents and patterns need no new graph.
    """

    def __init__(
        self,
        causal: bool = True,
        window: Sequence[int | None] | None = None,
        documents: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
        pattern: Pattern | None = None,
        content: Content | None = None,
    ) -> None:
        # `replace` passes the old mask's `content`, which can be reused unless it also changes documents or pattern.
        if content is None or documents is not content.documents or pattern is not content.pattern:
            content = Content(documents_of(documents), pattern)
        values = (check_bool("causal", causal), window_of(window), content.documents, pattern, content, content.numbers)
        for name, value in zip(("causal", "window", "documents", "pattern", "content", "numbers"), values, strict=True):
            object.__setattr__(self, name, value)
        if pattern is None:
            return
        kind = type(pattern).__name__
        if not self.causal and pattern.says_causal:
            raise ValueError(f"causal=False for {kind}, which itself defines visible later keys: leave causal=True")
        if self.causal and isinstance(pattern, RowMasks):
            raise ValueError("causal=True for rows of a batch; give each row a causal mask")
        if self.documents is not None and not pattern.takes_documents:
            raise ValueError(f"documents={short_repr(self.documents)} for {kind}, which takes none")
        if self.per_row and not isinstance(pattern, (Chunked, RowMasks)):
            raise ValueError(f"{kind} is of one row; AttentionMask.rows takes one mask for each row")

    # -- constructors -------------------------------------------------------------------------------------------------

    @classmethod
    def of_slices(cls, slices: Iterable[Slice]) -> AttentionMask:
        """Any mask, as a list of disjoint slices.

        Args:
            slices: `Slice(queries, keys, low, high)`. The query at i in the range `queries` sees the key at j in the
                range `keys` iff low <= j - i <= high. Ranges have step 1; None is an unbounded side.

        Raises:
            ValueError: a value that is not a slice; two slices that share a pair, with both slices and the pair.
        """
        return cls(causal=False, pattern=SliceList(slices))

    @classmethod
    def from_positions(
        cls, position_ids: Tensor, causal: bool = True, window: Sequence[int | None] | None = None
    ) -> AttentionMask:
        """Packed documents, each of which begins where a position is not the previous one plus 1, as in transformers.

        Args:
            position_ids: [N], or [B or 1, N], of whole rows. The host waits for them.

        Raises:
            ValueError: position ids of another shape, or no integers.
        """
        check_tensor("position_ids", position_ids)
        rows = position_ids[None] if position_ids.ndim == 1 else position_ids
        if rows.ndim != 2 or not rows.numel() or rows.is_floating_point() or rows.is_complex():
            shape = tuple(position_ids.shape)
            raise ValueError(
                f"position_ids {shape} {position_ids.dtype}: integers [N] or [B, N] of whole rows are needed"
            )
        return cls(causal=causal, window=window, documents=documents_from_positions(rows))

    @classmethod
    def tree(
        cls, ends: Sequence[int], parents: Sequence[int], window: Sequence[int | None] | None = None
    ) -> AttentionMask:
        """Sequences with shared beginnings, such as answers to one prompt. Each segment is stored once, depth first.

        A token sees its own segment up to itself, and all earlier segments on the path from the root. `positions`
        counts tokens along this path.

        Args:
            ends: boundaries of segments: 0, end of the first, ..., N.
            parents: the parent of each segment s: s - 1, an ancestor of s - 1, or -1 for a root.
            window: (left, right) in tokens along the path; the right side has no effect.

        Raises:
            ValueError: boundaries that do not rise from 0; another number of parents than of segments; parents that
                are none of these.
        """
        return cls(window=window, pattern=Tree(ends, parents))

    @classmethod
    def prefix(cls, documents: Sequence[int], prefixes: Sequence[int]) -> AttentionMask:
        """Prefix language model: bidirectional in the prefix of each document, causal after it.

        Args:
            prefixes: number of tokens of each document's prefix; none for empty documents.

        Raises:
            ValueError: prefixes for another number of documents, negative, or longer than their documents.
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
            origin: where chunks are counted from: the start of each "document", or the start of the "row", as in
                transformers.

        Raises:
            ValueError: a size below 1, or an unknown origin.
        """
        return cls(documents=documents, pattern=Chunked(size, origin))

    @classmethod
    def image_spans(
        cls,
        spans: Sequence[range],
        documents: Sequence[int] | None = None,
        window: Sequence[int | None] | None = None,
    ) -> AttentionMask:
        """Causal, but bidirectional within each span (Gemma 3's images); the window then hides distant keys.

        Args:
            spans: ranges of positions, disjoint, each within one document.
            window: (left, right); the right side has no effect, because later keys are visible within a span only.

        Raises:
            ValueError: spans that are empty, not ranges of step 1, overlap, or reach beyond their document.
        """
        mask = cls(window=window, documents=documents, pattern=ImageSpans(spans))
        ends = mask.boundaries()
        if ends is not None:
            cast(ImageSpans, mask.pattern).check(ends, ends[-1], ends[-1])
        return mask

    @classmethod
    def blocks(cls, visible: Any, block: int, length: int | None = None, causal: bool = False) -> AttentionMask:
        """Block-sparse: a table of the blocks of queries and keys that see each other.

        Args:
            visible: bool [n, n], or [n, m] for cross-attention: True if block i of queries sees block j of keys.
            block: tokens of a block; the last block may be shorter.
            length: number of queries. By default the mask fits any length of n blocks.
            causal: True also hides later keys.

        Raises:
            ValueError: a table that is empty or not bool with two dims, a block below 1, a length that does not make n
                blocks.
        """
        return cls(causal=causal, pattern=Blocks(visible, block, length))

    @classmethod
    def rows(cls, masks: Iterable[AttentionMask]) -> AttentionMask:
        """One mask for each row of a batch. `replace(mask, window=...)` narrows the mask of each row.

        Raises:
            ValueError: no masks, or an element that is not a mask of one row.
        """
        return cls(causal=False, pattern=RowMasks(tuple(masks)))

    # -- as a value ---------------------------------------------------------------------------------------------------

    def __hash__(self) -> int:
        return hash((*self.sides, self.content.hash))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, AttentionMask):
            return NotImplemented
        # The cached hashes are compared first. Long documents are compared only if their hashes are equal.
        if (self.causal, self.window, self.content.hash) != (other.causal, other.window, other.content.hash):
            return False
        return self.content is other.content or (self.documents, self.pattern) == (other.documents, other.pattern)

    def __repr__(self) -> str:
        fields = {"causal": self.causal, "window": self.window, "documents": self.documents, "pattern": self.pattern}
        return f"{type(self).__name__}({', '.join(f'{name}={short_repr(value)}' for name, value in fields.items())})"

    def narrow(self, left: int | None) -> Self:
        """Returns the mask with a left side of the window of at most `left` keys; None: the mask itself."""
        before, after = self.window or (None, None)
        if left is None or (before is not None and before <= left):
            return self
        # Not `replace`: torch.compile can trace this copy, and nothing is checked again.
        narrowed = object.__new__(type(self))
        for name, value in vars(self).items():
            object.__setattr__(narrowed, name, value)
        object.__setattr__(narrowed, "window", (left, after))
        return narrowed

    # -- in a compiled graph ------------------------------------------------------------------------------------------

    @property
    def sides(self) -> tuple[int, int, int]:
        """`causal` and the two sides of the window as integers; with `numbers` they are the whole mask."""
        before, after = self.window or (None, None)
        return int(self.causal), UNBOUNDED if before is None else before, UNBOUNDED if after is None else after

    @property
    def encoded(self) -> Integers:
        """The whole mask as integers: `sides`, followed by `numbers`."""
        return _encode(self.sides, self.numbers)

    @classmethod
    def read(cls, sides: Sequence[int], numbers: Tensor | None) -> AttentionMask:
        """Returns the mask with these `sides` and `numbers`."""
        # All layers of a step get the same object, because caches compare masks by identity first.
        return _read_mask(_encode(sides, numbers).tobytes())

    @classmethod
    def _decode(cls, encoded: Sequence[int]) -> AttentionMask:
        causal, before, after, code, row_count, *remaining = encoded
        window = (None if before == UNBOUNDED else before, None if after == UNBOUNDED else after)
        # Each list of boundaries follows its length. `row_count` is -1 for one list for all rows, 0 without documents.
        documents: list[Any] = []
        for _ in range(abs(row_count)):
            count, *remaining = remaining
            documents.append(remaining[:count])
            remaining = remaining[count:]
        boundaries = None if row_count == 0 else documents if row_count > 0 else documents[0]
        pattern: Pattern | None = None
        if code == RowMasks.code:
            # The mask of each row, as `encoded`, follows its length.
            masks = list[AttentionMask]()
            while remaining:
                size, *remaining = remaining
                masks.append(cls._decode(remaining[:size]))
                remaining = remaining[size:]
            pattern = RowMasks(masks)
        elif code:
            pattern = PATTERNS[code].of_numbers(remaining)
        return cls(bool(causal), window, boundaries, pattern)

    # -- rows of a batch ----------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int | None:
        """Number of rows, if the mask differs between rows; None if all rows have the same mask."""
        if isinstance(self.pattern, RowMasks):
            return len(self.pattern.masks)
        documents = self.documents
        return len(documents) if documents and isinstance(documents[0], tuple) else None

    @property
    def per_row(self) -> bool:
        return self.batch is not None

    def row(self, row: int) -> Self:
        if isinstance(self.pattern, RowMasks):
            mask: Self = self.pattern.masks[row]
            return mask if self.window is None else mask._intersect(self.window)
        if not self.per_row:
            return self
        return type(self)(self.causal, self.window, self.boundaries(row), self.pattern)

    def _intersect(self, window: Window) -> Self:
        """Returns the mask with the smaller side of both windows on each side."""
        sides = zip(self.window or (None, None), window, strict=True)
        smallest = [min((side for side in pair if side is not None), default=None) for pair in sides]
        return type(self)(self.causal, smallest, self.documents, self.pattern, self.content)

    def boundaries(self, row: int = 0) -> Ends:
        """Returns the document boundaries of one row of the batch, if any."""
        if isinstance(self.pattern, RowMasks):
            return self.pattern.masks[row].boundaries()
        documents = cast(Any, self.documents)
        return documents[row] if self.per_row else documents

    @property
    def _row_pattern(self) -> RowPattern | None:
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
        """Returns the visible pairs as disjoint slices (`core.slices`).

        If the mask differs between rows, there is an array of slices for each row, else one for all rows.

        Args:
            keys: number of keys, if it is not `length`.

        Raises:
            ValueError: a sequence that the mask does not fit.
        """
        keys, rows = length if keys is None else keys, range(self.batch or 1)
        for row in rows:
            self._check_row(row, length, keys)
        return [self.row(row)._slices(length, keys) for row in rows]

    def _slices(self, queries: int, keys: int) -> Slices:
        ends, pattern, bounds = self.boundaries(), self._row_pattern, band(self.causal, self.window)
        if pattern is None and ends is None:
            return slice_array([(0, queries, 0, keys, *bounds)])
        if pattern is None:
            return document_slices(ends or (), *bounds)
        # A pattern may apply causality or the window itself. `pattern.bounds` has the conditions that it leaves.
        slices = pattern.slices(ends, self.window, queries, keys)
        return within_band(slices, *pattern.bounds(self.causal, self.window))

    def positions(self, length: int, row: int = 0) -> Tensor:
        """Returns position ids for RoPE, a LongTensor [N].

        A position counts the tokens before it in its document, or on the path from the root in a tree.
        """
        self._check_row(row, length, length)
        mask = self.row(row)
        ends, pattern = mask.boundaries(), mask._row_pattern
        return torch.from_numpy(offsets(ends, length) if pattern is None else pattern.positions(ends, length))

    def segments(self, length: int) -> list[Segments]:
        """Returns the segments along which layers with a state run.

        If the mask differs between rows, there are `Segments` for each row, else once for all rows.

        Raises:
            ValueError: a mask that is not causal, or has a pattern other than a tree; a mask with a window, because a
                state cannot drop single tokens; a sequence that the mask does not fit.
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
        """Returns bool [T, S], True if the query at position queries[t] sees the key at position keys[s].

        For few tokens: its memory and time grow with T x S.
        """
        mask = self.row(row)
        # The positions may be a part of the sequence for which the mask was made.
        ends = mask.pattern.ends if isinstance(mask.pattern, Tree) else mask.boundaries()
        mask_length = ends[-1] if ends else mask.pattern.length if isinstance(mask.pattern, Blocks) else None
        length = max(mask_length or 0, *(1 + int(x.max()) if x.numel() else 0 for x in (queries, keys)))
        visible = torch.zeros(len(queries), len(keys), dtype=torch.bool, device=queries.device)
        i, j = queries[:, None], keys[None, :]
        for q0, q1, k0, k1, low, high in mask._slices(length, length).tolist():
            visible |= (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (low <= j - i) & (j - i <= high)
        return visible


def _encode(sides: Sequence[int], numbers: Tensor | None) -> Integers:
    return integers(sides, (0, 0) if numbers is None else numbers)


@lru_cache(maxsize=16)
def _read_mask(encoded: bytes) -> AttentionMask:
    return AttentionMask._decode(np.frombuffer(encoded, dtype=np.int64).tolist())  # pyright: ignore[reportPrivateUsage]


class Content:
    """Checked documents and pattern of a mask, with their encoding and hash.

    Attributes:
        numbers: the encoding, int64 [n]; None without documents and pattern. It has the pattern's code (0: none); the
            number of lists of boundaries, one per row, -1 for one list for all rows, or 0; each list after its length;
            the pattern's numbers.
    """

    def __init__(self, documents: Documents | None, pattern: Pattern | None) -> None:
        self.documents, self.pattern = documents, pattern
        self.numbers = None if documents is pattern is None else torch.from_numpy(_encode_content(documents, pattern))

    @cached_property
    def hash(self) -> int:
        # Unlike Python's hash of bytes, it is equal in every process.
        return 0 if self.numbers is None else crc32(self.numbers.numpy().tobytes())


def documents_from_positions(position_ids: Tensor) -> Documents:
    """Returns the boundaries at which positions [B, N] are not the previous ones plus 1; once if rows are alike."""
    length, starts = position_ids.shape[1], (position_ids.diff(dim=1) != 1).cpu()
    rows = tuple((0, *(row.nonzero().flatten() + 1).tolist(), length) for row in starts)
    return rows[0] if len(set(rows)) == 1 else rows


def _encode_content(documents: Documents | None, pattern: Pattern | None) -> Integers:
    per_row = documents is not None and isinstance(documents[0], tuple)
    rows = cast(Any, documents if per_row else () if documents is None else (documents,))
    count = len(rows) if per_row else -len(rows)
    code, numbers = (0, ()) if pattern is None else (pattern.code, pattern.numbers)
    return integers((code, count), *(item for row in rows for item in ((len(row),), row)), numbers)


# -- values derived from masks -----------------------------------------------------------------------------------------


Key = TypeVar("Key")
Value = TypeVar("Value")

MAX_ENTRIES = 8
MAX_BYTES = 2**28
"""Maximum estimated size of all entries together. The newest entry stays regardless of its size."""
ENTRY_BYTES, BYTES_PER_NUMBER = 2**14, 2**10
"""Estimated size of an entry: a constant, and for each number in the mask's documents and pattern."""


@dataclass
class BoundedCache(Generic[Key, Value]):
    """Values of the newest keys: (key, value, estimated bytes), the oldest first."""

    # A list and not a dict: a few keys, mostly identical objects, are compared faster than hashed.
    entries: list[tuple[Key, Value, int]] = field(default_factory=list[tuple[Key, Value, int]])

    def get(self, key: Key) -> Value | None:
        for cached_key, value, _ in self.entries:
            if cached_key == key:
                return value
        return None

    @property
    def newest(self) -> list[tuple[Key, Value]]:
        return [(key, value) for key, value, _ in reversed(self.entries)]

    def add(self, key: Key, value: Value, mask: AttentionMask) -> Value:
        """Adds a value and drops the oldest entries that no longer fit; the length of `mask` estimates the size."""
        size = ENTRY_BYTES if mask.numbers is None else ENTRY_BYTES + BYTES_PER_NUMBER * mask.numbers.numel()
        # A new list instead of an update in place: other threads may be reading.
        entries = [*self.entries[1 - MAX_ENTRIES :], (key, value, size)]
        while len(entries) > 1 and sum(size for *_, size in entries) > MAX_BYTES:
            entries.pop(0)
        self.entries = entries
        return value


# -- layouts -----------------------------------------------------------------------------------------------------------


def layout_of(
    kind: str,
    length: int,
    shards: int,
    mask: AttentionMask | None = None,
    balanced_by: Side | None = "queries",
    states: bool = False,
) -> SequenceLayout:
    """Returns a layout of kind "zigzag", "contiguous", "striped" or "balanced".

    Args:
        mask: the mask under which a balanced layout has even work; causal by default.
        balanced_by: the side whose work a balanced layout makes even, as in `SequenceLayout.balanced`. None: both
            sides, and bytes are ignored (`send_cost=0`) unless states are sent.
        states: as in `SequenceLayout.balanced`.

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
            if balanced_by is None and not states:
                return SequenceLayout.balanced(length, shards, mask=mask, send_cost=0)
            side = "both" if balanced_by is None else balanced_by
            return SequenceLayout.balanced(length, shards, mask=mask, balanced_by=side, states=states)
        case _:
            raise ValueError(f"no layout {kind!r}; known: zigzag, contiguous, striped, balanced")
