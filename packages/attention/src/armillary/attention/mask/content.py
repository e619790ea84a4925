"""What of a mask may be long."""

from __future__ import annotations

from typing import Any, cast

import torch

from armillary.attention.mask.pattern import Pattern

Documents = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""Boundaries of documents, of all rows or of each."""


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


def _listed(documents: Documents | None, pattern: Pattern | None) -> list[int]:
    """The pattern's code; -1, or how many rows have documents of their own; all boundaries; the pattern's numbers."""
    per_row = documents is not None and isinstance(documents[0], tuple)
    rows = cast(Any, documents if per_row else () if documents is None else (documents,))
    count = len(rows) if per_row else -len(rows)
    every: list[int] = [number for row in rows for number in (len(row), *row)]
    return [0, count, *every] if pattern is None else [pattern.code, count, *every, *pattern.numbers]
