"""What of a mask may be long."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast
from zlib import crc32

import torch

from armillary.attention.mask.pattern import Pattern, integers
from armillary.core.slices import Integers

Documents = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""Boundaries of documents, of all rows or of each."""


class Content:
    """What of a mask may be long, checked, and what is found of it once: as integers, and their hash."""

    def __init__(self, documents: Documents | None, pattern: Pattern | None) -> None:
        self.documents, self.pattern = documents, pattern
        self.numbers = None if documents is pattern is None else torch.from_numpy(_listed(documents, pattern))

    @cached_property
    def hash(self) -> int:
        """The same in every process."""
        return 0 if self.numbers is None else crc32(self.numbers.numpy().tobytes())

    def holds(self, documents: object, pattern: object) -> bool:
        """Whether it is of these very objects."""
        return documents is self.documents and pattern is self.pattern


def _listed(documents: Documents | None, pattern: Pattern | None) -> Integers:
    """The pattern's code; -1, or how many rows have documents of their own; all boundaries; the pattern's numbers."""
    per_row = documents is not None and isinstance(documents[0], tuple)
    rows = cast(Any, documents if per_row else () if documents is None else (documents,))
    count = len(rows) if per_row else -len(rows)
    code, rest = (0, ()) if pattern is None else (pattern.code, pattern.numbers)
    return integers((code, count), *(part for row in rows for part in ((len(row),), row)), rest)
