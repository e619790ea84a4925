"""What was found for the last few masks, for as many as fit into some memory: masks may be new at every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from armillary.attention.mask import AttentionMask

Key = TypeVar("Key")
Value = TypeVar("Value")

ENTRIES = 8
BYTES = 2**28
"""Of all entries together; the last one stays, whatever its size."""
PLAIN, EACH = 2**14, 2**10
"""What an entry is taken to hold: so much for a mask without lists, and so much for each number of those."""


@dataclass
class Recent(Generic[Key, Value]):
    """The values of the last keys, compared one by one: few, and mostly the same objects."""

    kept: list[tuple[Key, Value, int]] = field(default_factory=list[tuple[Key, Value, int]])

    def get(self, key: Key) -> Value | None:
        for known, value, _ in self.kept:
            if known == key:
                return value
        return None

    def add(self, key: Key, value: Value, mask: AttentionMask) -> Value:
        """Keeps the value, and lets go of the oldest ones that there is no room for."""
        size = PLAIN if mask.numbers is None else PLAIN + EACH * mask.numbers.numel()
        kept = [*self.kept[1 - ENTRIES :], (key, value, size)]
        while len(kept) > 1 and sum(size for *_, size in kept) > BYTES:
            kept.pop(0)
        self.kept = kept
        return value
