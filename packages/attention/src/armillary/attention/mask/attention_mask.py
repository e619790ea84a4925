"""Which keys a query sees, in global positions: a value, not a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from armillary.attention.mask.blocks import Blocks
from armillary.attention.mask.chunked import Chunked, Origin
from armillary.attention.mask.image_spans import ImageSpans
from armillary.attention.mask.pattern import Ends, Pattern, offsets
from armillary.attention.mask.prefix import Prefix
from armillary.attention.mask.rows import Rows
from armillary.attention.mask.slice_list import Slice, SliceList
from armillary.attention.mask.tree import Tree
from armillary.core.checked import Window, documents_of, flag, window_of
from armillary.core.slices import Slices, band, count_pairs, document_slices, slice_array, within_band

Documents = tuple[int, ...] | tuple[tuple[int, ...], ...]
CODES: dict[int, type[Pattern]] = {kind.code: kind for kind in (SliceList, Tree, Prefix, Chunked, ImageSpans, Blocks)}


class Content:
    """What of a mask may be long, checked, and what is found of it once: as integers, and their hash."""

    def __init__(self, documents: Documents | None, pattern: Pattern | None) -> None:
        self.documents, self.pattern = documents, pattern
        listed = _listed(documents, pattern)
        self.numbers = None if documents is pattern is None else torch.tensor(listed, device="cpu")
        self.hash = hash(tuple(listed))  # of numbers only: pickles go to other processes

    def holds(self, documents: object, pattern: object) -> bool:
        """Whether it is of these very objects."""
        return documents is self.documents and pattern is self.pattern


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMask:
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

    # FSDP2 rebuilds the dataclasses among a module's arguments at every call, field by field and number by number. What
    # may be long is no field, but an argument that `replace` hands on as it is.
    causal: bool = True
    window: Window | None = None
    if TYPE_CHECKING:
        documents: Documents | None = None
        pattern: Pattern | None = None
        content: Content = None  # pyright: ignore[reportAssignmentType] - set when constructed
    else:
        documents: InitVar[Documents | None] = None
        pattern: InitVar[Pattern | None] = None
        content: InitVar[Content | None] = None

    def __init__(
        self,
        causal: bool = True,
        window: Sequence[int | None] | None = None,
        documents: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
        pattern: Pattern | None = None,
        content: Content | None = None,
    ) -> None:
        if content is None or not content.holds(documents, pattern):
            content = Content(documents_of(documents), pattern)
        values = (flag("causal", causal), window_of(window), content.documents, pattern, content, content.numbers)
        for name, value in zip(("causal", "window", "documents", "pattern", "content", "numbers"), values, strict=True):
            object.__setattr__(self, name, value)
        if pattern is not None:
            self._check_pattern(pattern)

    numbers: ClassVar[Tensor | None] = None
    """All but `causal` and `window` as integers on the CPU [n]; None where there is nothing else.

    What a compiled graph may depend on without being compiled anew for each mask.
    """

    def _check_pattern(self, pattern: Pattern) -> None:
        name = type(pattern).__name__
        if not self.causal and pattern.says_causal:
            raise ValueError(f"causal=False for {name}, which says itself which later keys are seen: leave it True")
        if self.causal and isinstance(pattern, Rows):
            raise ValueError("causal=True for rows of a batch; give each row a mask that is")
        if self.documents is not None and not pattern.takes_documents:
            raise ValueError(f"documents={_short(self.documents)} for {name}, which takes none")
        if self.per_row and not isinstance(pattern, (Chunked, Rows)):
            raise ValueError(f"{name} is of one row; AttentionMask.rows takes one mask for each row")

    # -- constructors of other kinds ----------------------------------------------------------------------------------

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
        return cls(causal=False, pattern=Rows(tuple(masks)))

    # -- as a value ---------------------------------------------------------------------------------------------------

    def __hash__(self) -> int:
        left, right = (-1 if side is None else side for side in self.window or (None, None))
        return hash((self.causal, left, right, self.content.hash))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, AttentionMask):
            return NotImplemented
        if (self.causal, self.window, self.content.hash) != (other.causal, other.window, other.content.hash):
            return False
        return self.content is other.content or (self.documents, self.pattern) == (other.documents, other.pattern)

    def __repr__(self) -> str:
        shown = {"causal": self.causal, "window": self.window, "documents": self.documents, "pattern": self.pattern}
        return f"AttentionMask({', '.join(f'{name}={_short(value)}' for name, value in shown.items())})"

    def narrowed(self, left: int | None) -> AttentionMask:
        """This mask with a window of no more than `left` keys before each query; itself if it has that already."""
        before, after = self.window or (None, None)
        if left is None or (before is not None and before <= left):
            return self
        narrowed = object.__new__(
            AttentionMask
        )  # as torch.compile can trace it: nothing to check, nothing to look into
        for name, value in vars(self).items():
            object.__setattr__(narrowed, name, value)
        object.__setattr__(narrowed, "window", (left, after))
        return narrowed

    # -- of rows and sequences ----------------------------------------------------------------------------------------

    @property
    def batch(self) -> int | None:
        """How many rows have masks of their own; None where all are alike."""
        if isinstance(self.pattern, Rows):
            return len(self.pattern.masks)
        documents = self.documents
        return len(documents) if documents and isinstance(documents[0], tuple) else None

    @property
    def per_row(self) -> bool:
        """Whether the rows of a batch have masks of their own."""
        return self.batch is not None

    def row(self, row: int) -> AttentionMask:
        """The mask of one row of the batch."""
        if isinstance(self.pattern, Rows):
            mask: AttentionMask = self.pattern.masks[row]
            return mask if self.window is None else mask._within(self.window)
        if not self.per_row:
            return self
        return AttentionMask(self.causal, self.window, self.boundaries(row), self.pattern)

    def _within(self, window: Window) -> AttentionMask:
        """Both windows at once."""
        sides = zip(self.window or (None, None), window, strict=True)
        least = [min((side for side in pair if side is not None), default=None) for pair in sides]
        return AttentionMask(self.causal, least, self.documents, self.pattern)

    def boundaries(self, row: int = 0) -> Ends:
        """The document boundaries of one row of the batch, or None where there are no documents."""
        if isinstance(self.pattern, Rows):
            return self.pattern.masks[row].boundaries()
        documents = cast(Any, self.documents)
        return documents[row] if self.per_row else documents

    def check(self, queries: int, keys: int, batch: int) -> None:
        """Refuses a batch of `batch` rows of so many queries and keys that the mask does not fit."""
        if self.batch not in (None, batch):
            named = "masks" if isinstance(self.pattern, Rows) else "documents"
            raise ValueError(f"the mask has {named} for {self.batch} rows; the batch has {batch}")
        for number in range(self.batch or 1):
            self._check_row(number, queries, keys)

    def _check_row(self, number: int, queries: int, keys: int) -> None:
        mask = self.row(number)
        ends = mask.boundaries()
        for length in (queries, keys):
            if ends is not None and ends[-1] != length:
                raise ValueError(f"the documents of row {number} end at {ends[-1]}; the sequence has {length} tokens")
        if mask.pattern is not None:
            mask.pattern.check(ends, queries, keys)

    def slices(self, length: int, keys: int | None = None) -> list[Slices]:
        """Who sees whom, as disjoint slices (`core.slices`): of each row with a mask of its own, or of all alike.

        Args:
            keys: how many, where there are not as many as queries.

        Raises:
            ValueError: a sequence that the mask does not fit.
        """
        keys, rows = length if keys is None else keys, range(self.batch or 1)
        for row in rows:
            self._check_row(row, length, keys)
        return [self.row(row)._slices(length, keys) for row in rows]

    def slices_up_to(self, length: int) -> Slices:
        """Of a mask of one row, for some positions below `length`, however long the sequence is."""
        length = max(length, self._length() or 0)
        return self._slices(length, length)

    def _slices(self, queries: int, keys: int) -> Slices:
        ends, pattern, bounds = self.boundaries(), self.pattern, band(self.causal, self.window)
        if pattern is None and ends is None:
            return slice_array([(0, queries, 0, keys, *bounds)])
        if pattern is None:
            return document_slices(ends or (), *bounds)
        made = pattern.slices(ends, self.window, queries, keys)
        return within_band(made, *pattern.bounds(self.causal, self.window))

    def positions(self, length: int, row: int = 0) -> Tensor:
        """Positions for RoPE, a LongTensor [N]: depths along the path in trees, offsets in documents elsewhere.

        Those of slices and blocks are 0 .. N - 1.
        """
        self._check_row(row, length, length)
        mask = self.row(row)
        ends = mask.boundaries()
        return torch.from_numpy(offsets(ends, length) if mask.pattern is None else mask.pattern.positions(ends, length))

    def pairs(self, length: int, row: int = 0) -> int:
        """How many (query, key) pairs of a sequence of `length` tokens are visible, counted without looking at each.

        Raises:
            ValueError: a sequence of that row that the mask does not fit.
        """
        self._check_row(row, length, length)
        return count_pairs(self.row(row)._slices(length, length))

    def visible(self, queries: Tensor, keys: Tensor, row: int = 0) -> Tensor:
        """Dense visibility [T, S] of key positions [S] to query positions [T], for pictures and tests."""
        last = 1 + max(int(x.max()) if x.numel() else 0 for x in (queries, keys))
        seen = torch.zeros(len(queries), len(keys), dtype=torch.bool, device=queries.device)
        i, j = queries[:, None], keys[None, :]
        for q0, q1, k0, k1, low, high in self.row(row).slices_up_to(last).tolist():
            seen |= (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (low <= j - i) & (j - i <= high)
        return seen

    def _length(self) -> int | None:
        """Tokens of the sequence, where the mask knows."""
        ends = self.boundaries()
        if ends is not None or isinstance(self.pattern, Tree):
            return (ends or cast(Tree, self.pattern).ends)[-1]
        return self.pattern.length if isinstance(self.pattern, Blocks) else None

    # -- as integers, which is what a compiled graph takes ------------------------------------------------------------

    @classmethod
    def of_numbers(cls, causal: bool, window: Window | None, numbers: Sequence[int]) -> AttentionMask:
        """The mask whose `numbers` these are."""
        code, rows, *rest = numbers
        documents: list[Any] = []
        for _ in range(abs(rows)):
            count, *rest = rest
            documents.append(rest[:count])
            rest = rest[count:]
        pattern = _rows_of(rest) if code == Rows.code else CODES[code].of_numbers(rest) if code else None
        return cls(causal, window, (documents if rows > 0 else documents[0]) if rows else None, pattern)

    @property
    def encoded(self) -> tuple[int, ...]:
        """The whole mask as integers."""
        left, right = (-1 if side is None else side for side in self.window or (None, None))
        return int(self.causal), left, right, *([0, 0] if self.numbers is None else self.numbers.tolist())


def _rows_of(numbers: Sequence[int]) -> Rows:
    masks = list[AttentionMask]()
    while numbers:
        causal, *sides = numbers[1:4]
        window = cast(Window, tuple(None if side == -1 else side for side in sides))
        masks.append(AttentionMask.of_numbers(bool(causal), window, numbers[4 : 1 + numbers[0]]))
        numbers = numbers[1 + numbers[0] :]
    return Rows(masks)


def _listed(documents: Documents | None, pattern: Pattern | None) -> list[int]:
    """The pattern's code; -1, or how many rows have documents of their own; all boundaries; the pattern's numbers."""
    per_row = documents is not None and isinstance(documents[0], tuple)
    rows = cast(Any, documents if per_row else () if documents is None else (documents,))
    count = len(rows) if per_row else -len(rows)
    every: list[int] = [number for row in rows for number in (len(row), *row)]
    return [0, count, *every] if pattern is None else [pattern.code, count, *every, *pattern.numbers]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 96 else f"{text[:93]}..."
