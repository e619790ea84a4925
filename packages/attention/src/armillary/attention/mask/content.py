"""`Content`: the documents and the pattern of a mask, which may be long."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast
from zlib import crc32

import torch

from armillary.attention.mask.pattern import Pattern, integers
from armillary.core.parts import Integers

Documents = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""Boundaries of documents (0, end of the first, ..., N): one tuple for all rows, or a tuple of one for each row."""


class Content:
    """Checked documents and pattern of a mask, with their encoding and hash.

    Attributes:
        numbers: the encoding, int64 [n]; None without documents and pattern. It has the pattern's code (0: none); the
            number of lists of boundaries, one per row, -1 for one list for all rows, or 0; each list after its length;
            the pattern's numbers.
    """

    def __init__(self, documents: Documents | None, pattern: Pattern | None) -> None:
        self.documents, self.pattern = documents, pattern
        self.numbers = None if documents is pattern is None else torch.from_numpy(_encode(documents, pattern))

    @cached_property
    def hash(self) -> int:
        """Hash of `numbers`. Unlike Python's hash of bytes, it is equal in every process."""
        return 0 if self.numbers is None else crc32(self.numbers.numpy().tobytes())


def _encode(documents: Documents | None, pattern: Pattern | None) -> Integers:
    per_row = documents is not None and isinstance(documents[0], tuple)
    rows = cast(Any, documents if per_row else () if documents is None else (documents,))
    count = len(rows) if per_row else -len(rows)
    code, numbers = (0, ()) if pattern is None else (pattern.code, pattern.numbers)
    return integers((code, count), *(item for row in rows for item in ((len(row),), row)), numbers)
