"""What a mask says, as a value: which rows, slices and positions. Its kinds are made in `attention_mask.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor

from armillary.attention.mask.blocks import Blocks
from armillary.attention.mask.chunked import Chunked
from armillary.attention.mask.content import Content, Documents
from armillary.attention.mask.pattern import Ends, Pattern, RowPattern, integers, offsets, shortened
from armillary.attention.mask.row_masks import RowMasks
from armillary.attention.mask.tree import Tree
from armillary.core.checked import Window, documents_of, flag, window_of
from armillary.core.segments import Segments
from armillary.core.slices import Integers, Slices, band, count_pairs, document_slices, slice_array, within_band


@dataclass(frozen=True, eq=False, repr=False)
class MaskValue:
    """The fields of `AttentionMask`, and what follows from them."""

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
        if self.causal and isinstance(pattern, RowMasks):
            raise ValueError("causal=True for rows of a batch; give each row a mask that is")
        if self.documents is not None and not pattern.takes_documents:
            raise ValueError(f"documents={shortened(self.documents)} for {name}, which takes none")
        if self.per_row and not isinstance(pattern, (Chunked, RowMasks)):
            raise ValueError(f"{name} is of one row; AttentionMask.rows takes one mask for each row")

    # -- as a value ---------------------------------------------------------------------------------------------------

    def __hash__(self) -> int:
        left, right = (-1 if side is None else side for side in self.window or (None, None))
        return hash((self.causal, left, right, self.content.hash))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, MaskValue):
            return NotImplemented
        if (self.causal, self.window, self.content.hash) != (other.causal, other.window, other.content.hash):
            return False
        return self.content is other.content or (self.documents, self.pattern) == (other.documents, other.pattern)

    def __repr__(self) -> str:
        shown = {"causal": self.causal, "window": self.window, "documents": self.documents, "pattern": self.pattern}
        return f"{type(self).__name__}({', '.join(f'{name}={shortened(value)}' for name, value in shown.items())})"

    def narrowed(self, left: int | None) -> Self:
        """This mask with a window of no more than `left` keys before each query; itself if it has that already."""
        before, after = self.window or (None, None)
        if left is None or (before is not None and before <= left):
            return self
        narrowed = object.__new__(type(self))  # what torch.compile can trace: nothing is looked into again
        for name, value in vars(self).items():
            object.__setattr__(narrowed, name, value)
        object.__setattr__(narrowed, "window", (left, after))
        return narrowed

    # -- of rows and sequences ----------------------------------------------------------------------------------------

    @property
    def batch(self) -> int | None:
        """How many rows have masks of their own; None where all are alike."""
        if isinstance(self.pattern, RowMasks):
            return len(self.pattern.masks)
        documents = self.documents
        return len(documents) if documents and isinstance(documents[0], tuple) else None

    @property
    def per_row(self) -> bool:
        """Whether the rows of a batch have masks of their own."""
        return self.batch is not None

    def row(self, row: int) -> Self:
        """The mask of one row of the batch."""
        if isinstance(self.pattern, RowMasks):
            mask: Self = self.pattern.masks[row]
            return mask if self.window is None else mask._within(self.window)
        if not self.per_row:
            return self
        return type(self)(self.causal, self.window, self.boundaries(row), self.pattern)

    @property
    def _row_pattern(self) -> RowPattern | None:
        """Of a mask of one row, which has no masks of rows."""
        return cast("RowPattern | None", self.pattern)

    def _within(self, window: Window) -> Self:
        """Both windows at once."""
        sides = zip(self.window or (None, None), window, strict=True)
        least = [min((side for side in pair if side is not None), default=None) for pair in sides]
        return type(self)(self.causal, least, self.documents, self.pattern, self.content)

    def boundaries(self, row: int = 0) -> Ends:
        """The document boundaries of one row of the batch, or None where there are no documents."""
        if isinstance(self.pattern, RowMasks):
            return self.pattern.masks[row].boundaries()
        documents = cast(Any, self.documents)
        return documents[row] if self.per_row else documents

    def check(self, queries: int, keys: int, batch: int) -> None:
        """Refuses a batch of `batch` rows of so many queries and keys that the mask does not fit."""
        if self.batch not in (None, batch):
            named = "masks" if isinstance(self.pattern, RowMasks) else "documents"
            raise ValueError(f"the mask has {named} for {self.batch} rows; the batch has {batch}")
        for number in range(self.batch or 1):
            self._check_row(number, queries, keys)

    def _check_row(self, number: int, queries: int, keys: int) -> None:
        mask = self.row(number)
        ends = mask.boundaries()
        for length in (queries, keys):
            if ends is not None and ends[-1] != length:
                raise ValueError(f"the documents of row {number} end at {ends[-1]}; the sequence has {length} tokens")
        if (pattern := mask._row_pattern) is not None:
            pattern.check(ends, queries, keys)

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
        ends, pattern, bounds = self.boundaries(), self._row_pattern, band(self.causal, self.window)
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
        pattern = mask._row_pattern
        return torch.from_numpy(offsets(ends, length) if pattern is None else pattern.positions(ends, length))

    def segments(self, length: int) -> list[Segments]:
        """Returns the segments along which layers with a state run, of each row that has its own, or of all rows alike.

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
            Segments(mask.pattern.ends, mask.pattern.parents)
            if isinstance(mask.pattern, Tree)
            else Segments.documents(mask.boundaries() or (0, length))
            for mask in rows
        ]

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

    @property
    def encoded(self) -> Integers:
        """The whole mask as integers."""
        left, right = (-1 if side is None else side for side in self.window or (None, None))
        return integers((self.causal, left, right), (0, 0) if self.numbers is None else self.numbers)
