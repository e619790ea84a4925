"""Bookkeeping of bytes: what is held now, and what was held when it was most."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(eq=False)
class Block:
    """Memory that is held: its bytes, what it is for, and the moment since when it has been held at this size."""

    account: Account
    bytes: int
    category: str
    since: int = 0


@dataclass(eq=False)
class Account:
    """The blocks of one memory, the device's or the host's, in bytes by category.

    A block may be told late what it is for: a gradient is one among many tensors until it turns up in a parameter's
    `.grad`. While it is held, the breakdown at the peak is corrected too.
    """

    current: Counter[str] = field(default_factory=Counter[str])
    total: int = 0
    peak: int = 0
    at_peak: Counter[str] = field(default_factory=Counter[str])
    """What the peak was made of."""
    label_at_peak: str | None = None
    """What was being computed then."""

    _moment: int = 0
    _peak_moment: int = 0

    def take(self, bytes: int, category: str, label: str | None = None) -> Block:
        """A new block. `label`: what is being computed."""
        block = Block(self, 0, category)
        self.resize(block, bytes, label)
        return block

    def resize(self, block: Block, bytes: int, label: str | None = None) -> None:
        """Gives a block of this account another size; 0 gives its memory back."""
        self._moment += 1
        self.current[block.category] += bytes - block.bytes
        self.total += bytes - block.bytes
        block.bytes, block.since = bytes, self._moment
        if self.total > self.peak:
            self.peak, self.at_peak, self.label_at_peak = self.total, self.current.copy(), label
            self._peak_moment = self._moment

    def book(self, block: Block, category: str) -> None:
        """Books a block of this account under another category, at the peak too if it was part of it."""
        books = [self.current]
        if block.since <= self._peak_moment:
            books.append(self.at_peak)
        for book in books:
            book[block.category] -= block.bytes
            book[category] += block.bytes
        block.category = category

    def hand_over(self, block: Block, other: Account) -> None:
        """Moves a block of this account to another one."""
        size = block.bytes
        self.resize(block, 0)
        block.account = other
        other.resize(block, size)

    def breakdown(self) -> dict[str, int]:
        """Bytes at the peak by category, largest first."""
        return {category: bytes for category, bytes in self.at_peak.most_common() if bytes}
