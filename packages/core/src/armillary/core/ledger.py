"""Counting the bytes that this rank sends."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ClassVar, Self

_phase: ContextVar[str] = ContextVar("phase", default="forward")


@dataclass
class CommLedger:
    """While it is open, counts the bytes that this process sends through the primitives of `armillary.core`.

        with CommLedger() as ledger:
            attend(q, k, v, mask=mask, layout=layout).backward(dout)
        ledger.bytes(axis="ring", phase="backward")

    It sees every thread of the process, because autograd runs backward passes on threads of its own. Bytes that a rank
    keeps for itself are not counted. Ledgers nest; each counts for itself.
    """

    entries: Counter[tuple[str, str, str]] = field(default_factory=Counter[tuple[str, str, str]])

    _open: ClassVar[list[CommLedger]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __enter__(self) -> Self:
        with self._lock:
            self._open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open[:] = [ledger for ledger in self._open if ledger is not self]

    def bytes(self, axis: str | None = None, kind: str | None = None, phase: str | None = None) -> int:
        """Bytes sent on one axis, by one kind, in one phase ("forward", "backward"); None: all.

        Kinds are "p2p", "all_to_all", "all_gather" and "reduce_scatter".
        """
        wanted = (axis, kind, phase)
        return sum(
            n for key, n in self.entries.items() if all(w in (None, k) for w, k in zip(wanted, key, strict=True))
        )

    @classmethod
    def add(cls, axis: str, kind: str, sent: int) -> None:
        with cls._lock:
            for ledger in cls._open:
                ledger.entries[axis, kind, _phase.get()] += sent


def record(axis: str, kind: str, sent: int) -> None:
    """Called by each primitive with the bytes that it sends to other ranks."""
    CommLedger.add(axis, kind, sent)


@contextmanager
def phase(name: str) -> Generator[None]:
    """Books what is sent meanwhile, on this thread, under the phase `name`."""
    token = _phase.set(name)
    try:
        yield
    finally:
        _phase.reset(token)
