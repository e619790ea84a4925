"""Bookkeeping of bytes: what is held now, and what was held when it was most."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(eq=False)
class Allocation:
    """Memory that is held: its bytes, what it is for, and the moment since when it has been held at this size."""

    account: Account
    bytes: int
    category: str
    since: int = 0


@dataclass(eq=False)
class Account:
    """The allocations of one memory, the device's or the host's, in bytes by category.

    The category of an allocation may be known late: a gradient is one among many tensors until it turns up in a
    parameter's `.grad`. While it is held, the breakdown at the peak is corrected too.
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

    def take(self, bytes: int, category: str, label: str | None = None) -> Allocation:
        """A new allocation. `label`: what is being computed."""
        allocation = Allocation(self, 0, category)
        self.resize(allocation, bytes, label)
        return allocation

    def resize(self, allocation: Allocation, bytes: int, label: str | None = None) -> None:
        """Gives an allocation of this account another size; 0 gives its memory back."""
        self._moment += 1
        self.current[allocation.category] += bytes - allocation.bytes
        self.total += bytes - allocation.bytes
        allocation.bytes, allocation.since = bytes, self._moment
        if self.total > self.peak:
            self.peak, self.at_peak, self.label_at_peak = self.total, self.current.copy(), label
            self._peak_moment = self._moment

    def book(self, allocation: Allocation, category: str) -> None:
        """Books an allocation of this account under another category, at the peak too if it was part of it."""
        books = [self.current]
        if allocation.since <= self._peak_moment:
            books.append(self.at_peak)
        for book in books:
            book[allocation.category] -= allocation.bytes
            book[category] += allocation.bytes
        allocation.category = category

    def hand_over(self, allocation: Allocation, other: Account) -> None:
        """Moves an allocation of this account to another one."""
        size = allocation.bytes
        self.resize(allocation, 0)
        allocation.account = other
        other.resize(allocation, size)

    def breakdown(self) -> dict[str, int]:
        """Bytes at the peak by category, largest first."""
        return {category: bytes for category, bytes in self.at_peak.most_common() if bytes}
