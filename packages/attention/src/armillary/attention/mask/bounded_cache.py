"""A cache of values derived from the last few masks. Its memory is bounded, because every step may have a new mask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from armillary.attention.mask.attention_mask import AttentionMask

Key = TypeVar("Key")
Value = TypeVar("Value")

MAX_ENTRIES = 8
MAX_BYTES = 2**28
"""Maximum estimated size of all entries together. The newest entry stays regardless of its size."""
ENTRY_BYTES, BYTES_PER_NUMBER = 2**14, 2**10
"""Estimated size of an entry: a constant, and for each number in the mask's documents and pattern."""


@dataclass
class BoundedCache(Generic[Key, Value]):
    """Values of the newest keys.

    Args:
        entries: (key, value, estimated bytes), the oldest first. A list and not a dict, because a few keys are compared
            faster than hashed: mostly they are identical objects.
    """

    entries: list[tuple[Key, Value, int]] = field(default_factory=list[tuple[Key, Value, int]])

    def get(self, key: Key) -> Value | None:
        for cached_key, value, _ in self.entries:
            if cached_key == key:
                return value
        return None

    @property
    def newest(self) -> list[tuple[Key, Value]]:
        """Keys and values, the newest first."""
        return [(key, value) for key, value, _ in reversed(self.entries)]

    def add(self, key: Key, value: Value, mask: AttentionMask) -> Value:
        """Adds a value, drops the oldest entries that no longer fit, and returns the value.

        Args:
            mask: the mask from which the value was computed. Its length gives the estimated size.
        """
        size = ENTRY_BYTES if mask.numbers is None else ENTRY_BYTES + BYTES_PER_NUMBER * mask.numbers.numel()
        # A new list instead of an update in place: other threads may be reading.
        entries = [*self.entries[1 - MAX_ENTRIES :], (key, value, size)]
        while len(entries) > 1 and sum(size for *_, size in entries) > MAX_BYTES:
            entries.pop(0)
        self.entries = entries
        return value
