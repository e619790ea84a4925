"""`Account`: bytes allocated in one memory, by category, now and at the peak."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(eq=False)
class Allocation:
    """A live allocation.

    Args:
        resize_time: time of its last change of size, on the clock of its account.
    """

    account: Account
    bytes: int
    category: str
    resize_time: int = 0


@dataclass(eq=False)
class Account:
    """The allocations of one memory (the device's or the host's), in bytes by category.

    The category of an allocation may become known after the peak. For example, a gradient is known as one when it
    appears in a parameter's `.grad`. `relabel` then also corrects the bytes at the peak.

    Args:
        current: live bytes by category.
        total: live bytes.
        peak: maximum of `total` so far.
        at_peak: bytes by category at the peak.
        label_at_peak: label of the computation at the peak.
    """

    current: Counter[str] = field(default_factory=Counter[str])
    total: int = 0
    peak: int = 0
    at_peak: Counter[str] = field(default_factory=Counter[str])
    label_at_peak: str | None = None

    # A clock that counts resizes, and its time at the peak.
    _time: int = 0
    _peak_time: int = 0

    def allocate(self, bytes: int, category: str, label: str | None = None) -> Allocation:
        """Adds and returns an allocation, made during the computation `label`."""
        allocation = Allocation(self, 0, category)
        self.resize(allocation, bytes, label)
        return allocation

    def resize(self, allocation: Allocation, bytes: int, label: str | None = None) -> None:
        """Changes an allocation's size; 0 frees it."""
        self._time += 1
        self.current[allocation.category] += bytes - allocation.bytes
        self.total += bytes - allocation.bytes
        allocation.bytes, allocation.resize_time = bytes, self._time
        if self.total > self.peak:
            self.peak, self.at_peak, self.label_at_peak = self.total, self.current.copy(), label
            self._peak_time = self._time

    def relabel(self, allocation: Allocation, category: str) -> None:
        """Moves an allocation to another category, also in the bytes at the peak if it was live then."""
        # If the allocation has not changed its size since the peak, its bytes are part of the peak.
        live_at_peak = allocation.resize_time <= self._peak_time
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
