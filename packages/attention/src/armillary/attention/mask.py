"""Which keys a query sees, in global positions: a value, not a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from armillary.core.balance import Visibility
from armillary.core.checked import Window, documents_of, flag, window_of


@dataclass(frozen=True)
class AttentionMask:
    """A key at position j is visible to a query at position i if all that is asked for here holds.

    Args:
        causal: `j <= i`.
        window: (left, right): `i - left <= j <= i + right`; None on a side is unbounded.
        documents: boundaries (cu_seqlens: 0, end of the first, ..., N) of the documents that the sequence is packed
            from; i and j must lie in one document. One list for all rows of a batch, or a list of lists, one for each
            row.

    Sequences may be integer tensors or arrays; kept as tuples. Hashable; cheap to compare; knows nothing of shards.

    Raises:
        ValueError: a window that is not two sides, each None or an integer of at least 0; boundaries that are no
            integers, do not start at 0 or do not rise, or are of some rows only; causal neither True nor False.
    """

    causal: bool = True
    window: Window | None = None
    documents: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None

    def __init__(
        self,
        causal: bool = True,
        window: Sequence[int | None] | None = None,
        documents: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> None:
        object.__setattr__(self, "causal", flag("causal", causal))
        object.__setattr__(self, "window", window_of(window))
        object.__setattr__(self, "documents", documents_of(documents))
        # Looked up for every call, and boundaries may be many. Of numbers only: pickles go to other processes.
        left, right = (-1 if side is None else side for side in self.window or (None, None))
        object.__setattr__(self, "ends", _tensor(self.documents))
        object.__setattr__(self, "_hash", hash((self.causal, left, right, self.documents or ())))

    def __hash__(self) -> int:
        return self.__dict__["_hash"]  # not a field: those are what `replace` rebuilds

    ends: ClassVar[Tensor | None] = None
    """`documents` as integers on the CPU, [n + 1] or [B, n + 1] filled up with -1: what a compiled graph may depend on
    without being compiled anew for each mask."""

    @property
    def per_row(self) -> bool:
        """Whether the rows of a batch have documents of their own."""
        return bool(self.documents) and isinstance(self.documents[0], tuple)

    def boundaries(self, row: int = 0) -> tuple[int, ...] | None:
        """The document boundaries of one row of the batch, or None where there are no documents."""
        documents = self.documents
        return documents[row] if self.per_row else documents  # pyright: ignore[reportOptionalSubscript, reportReturnType]

    def bounds(self) -> Window:
        """The smallest and the largest `j - i` that may be visible; None: unbounded."""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return None if left is None else -left, right

    def check(self, length: int, batch: int) -> None:
        """Refuses documents that do not fit a batch of `batch` rows of `length` tokens."""
        if self.per_row and len(self.documents or ()) != batch:
            raise ValueError(f"the mask has documents for {len(self.documents or ())} rows; the batch has {batch}")
        for row in range(batch if self.per_row else 1):
            ends = self.boundaries(row)
            if ends is not None and ends[-1] != length:
                raise ValueError(f"the documents of row {row} end at {ends[-1]}; the sequence has {length} tokens")

    def narrowed(self, left: int | None) -> AttentionMask:
        """This mask with a window of no more than `left` keys before each query; itself if it has that already."""
        before, after = self.window or (None, None)
        if left is None or (before is not None and before <= left):
            return self
        return replace(self, window=(left, after))

    def pairs(self, length: int, row: int = 0) -> int:
        """How many (query, key) pairs of a sequence of `length` tokens are visible, counted without looking at each.

        Raises:
            ValueError: documents of that row that do not end at `length`.
        """
        ends = self.boundaries(row) or (0, length)
        if ends[-1] != length:
            raise ValueError(f"the documents of row {row} end at {ends[-1]}; the sequence has {length} tokens")
        return Visibility.of(length, self.causal, self.window, ends).pairs(0, length)

    def visible(self, queries: Tensor, keys: Tensor, row: int = 0) -> Tensor:
        """Dense visibility [T, S] of key positions [S] to query positions [T], for oracles and pictures."""
        offset = keys[None, :] - queries[:, None]
        low, high = self.bounds()
        seen = torch.ones_like(offset, dtype=torch.bool)
        seen = seen if low is None else seen & (offset >= low)
        seen = seen if high is None else seen & (offset <= high)
        ends = self.boundaries(row)
        if ends is not None:
            inner = torch.tensor(ends[1:-1], device=queries.device)
            seen = seen & (
                torch.bucketize(queries, inner, right=True)[:, None] == torch.bucketize(keys, inner, right=True)
            )
        return seen


def _tensor(documents: tuple[int, ...] | tuple[tuple[int, ...], ...] | None) -> Tensor | None:
    if documents is None:
        return None
    rows = [[row] if isinstance(row, int) else row for row in documents]
    if rows and isinstance(documents[0], int):
        return torch.tensor(documents, dtype=torch.int64, device="cpu")
    longest = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[-1] * (longest - len(row))] for row in rows], dtype=torch.int64, device="cpu")
