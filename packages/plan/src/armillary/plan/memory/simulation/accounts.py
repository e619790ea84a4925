"""`Account`: allocated bytes of one memory by category, and their breakdown at the peak."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(eq=False)
class Allocation:
    """An allocation; `since` is the account's time of its last change of size."""

    account: Account
    bytes: int
    category: str
    since: int = 0


@dataclass(eq=False)
class Account:
    """The allocations of one memory, the device's or the host's, in bytes by category.

    An allocation's category may only be known later: a gradient is one of many tensors until it appears in a
    parameter's `.grad`. `relabel` then also corrects the breakdown at the peak.

    Args:
        at_peak: breakdown at the peak.
        label_at_peak: label of the computation at the peak.
    """

    current: Counter[str] = field(default_factory=Counter[str])
    total: int = 0
    peak: int = 0
    at_peak: Counter[str] = field(default_factory=Counter[str])
    label_at_peak: str | None = None

    _time: int = 0
    _peak_time: int = 0

    def allocate(self, bytes: int, category: str, label: str | None = None) -> Allocation:
        """A new allocation, made during the computation `label`."""
        allocation = Allocation(self, 0, category)
        self.resize(allocation, bytes, label)
        return allocation

    def resize(self, allocation: Allocation, bytes: int, label: str | None = None) -> None:
        """Changes an allocation's size; 0 frees it."""
        self._time += 1
        self.current[allocation.category] += bytes - allocation.bytes
        self.total += bytes - allocation.bytes
        allocation.bytes, allocation.since = bytes, self._time
        if self.total > self.peak:
            self.peak, self.at_peak, self.label_at_peak = self.total, self.current.copy(), label
            self._peak_time = self._time

    def relabel(self, allocation: Allocation, category: str) -> None:
        """Moves an allocation to another category; also at the peak, if it was live then."""
        # An allocation that has not changed its size since the peak was part of it.
        live_at_peak = allocation.since <= self._peak_time
        for counter in (self.current, self.at_peak) if live_at_peak else (self.current,):
            counter[allocation.category] -= allocation.bytes
            counter[category] += allocation.bytes
        allocation.category = category

    def transfer(self, allocation: Allocation, account: Account) -> None:
        """Moves an allocation to another account."""
        size = allocation.bytes
        self.resize(allocation, 0)
        allocation.account = account
        account.resize(allocation, size)

    def breakdown(self) -> dict[str, int]:
        """Bytes at the peak by category, largest first."""
        return {category: bytes for category, bytes in self.at_peak.most_common() if bytes}
