"""The byte ledger: `CommLedger` counts the bytes that a rank sends, by axis, kind and phase."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ClassVar, Self

from armillary.core.argument_checks import check_choice

Key = tuple[str, str, str]
"""(axis, kind, phase)."""

KINDS = ("p2p", "all_to_all", "all_gather", "reduce_scatter", "all_reduce")
PHASES = ("forward", "backward")
EXACT, UNITS = 15, 11
NUMBERS = EXACT + 1 + UNITS
"""Widths in characters of columns of the table: exact bytes, bytes with a unit, and both together."""

_phase: ContextVar[str] = ContextVar("phase", default="forward")


@dataclass
class CommLedger:
    """Counts the bytes that this process sends through the primitives of `armillary.core` while it is open.

        with CommLedger() as ledger:
            attend(q, k, v, mask=mask, layout=layout).backward(dout)
        ledger.bytes(axis="ring", phase="backward")
        print(ledger.table())

    axis     kind                            forward                     backward                        total  messages
    ring     p2p                  49,152  48.000 KiB          122,880 120.000 KiB          172,032 168.000 KiB         9
    ulysses  all_to_all           65,536  64.000 KiB           65,536  64.000 KiB          131,072 128.000 KiB         8
    total                        114,688 112.000 KiB          188,416 184.000 KiB          303,104 296.000 KiB        17

    It counts the bytes of all threads of the process, because autograd runs backward passes on other threads. Data that
    a rank sends to itself does not count. Ledgers may be nested; each counts all bytes.
    """

    entries: Counter[Key] = field(default_factory=Counter[Key])
    """Number of bytes sent, by (axis, kind, phase)."""
    sends: Counter[Key] = field(default_factory=Counter[Key])
    """Number of messages sent, by (axis, kind, phase)."""

    opened: ClassVar[list[CommLedger]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __enter__(self) -> Self:
        with self._lock:
            self.opened.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            # By identity: two ledgers with equal counts compare equal.
            self.opened[:] = [ledger for ledger in self.opened if ledger is not self]

    def bytes(self, axis: str | None = None, kind: str | None = None, phase: str | None = None) -> int:
        """Returns the bytes sent on an axis, by messages of a kind, in a phase. None stands for all.

        Args:
            axis: name of the axis.
            kind: "p2p", "all_to_all", "all_gather", "reduce_scatter" or "all_reduce". A "reduce_scatter" is sent as an
                all-to-all and summed by the receiver. An "all_reduce" is the backend's, and counted as one around a
                ring.
            phase: "forward" or "backward".

        Raises:
            ValueError: an unknown kind or phase, or an axis that is not a string.
        """
        return _total(self.entries, (axis, kind, phase))

    def messages(self, axis: str | None = None, kind: str | None = None, phase: str | None = None) -> int:
        """Returns the number of messages sent. The arguments are those of `bytes`.

        An exchange or collective counts one for each rank that it sends to, an all-reduce one for each step of a ring.
        """
        return _total(self.sends, (axis, kind, phase))

    def table(self) -> str:
        """Formats bytes by axis and kind: those of forward, of backward and of both, as in the example above."""
        rows = sorted({(axis, kind) for (axis, kind, _), size in self.entries.items() if size})
        if not rows:
            return "nothing was sent"
        lines = [("axis", "kind", *(f"{phase:>{NUMBERS}}" for phase in (*PHASES, "total")), "messages")]
        lines += [(axis, kind, *self._figures(axis, kind)) for axis, kind in rows]
        lines += [("total", "", *self._figures(None, None))]
        width = [max(len(line[column]) for line in lines) for column in (0, 1)]
        return "\n".join(
            f"{axis:{width[0]}}  {kind:{width[1]}}  {'  '.join(figures)}  {messages:>8}"
            for axis, kind, *figures, messages in lines
        )

    def _figures(self, axis: str | None, kind: str | None) -> tuple[str, ...]:
        sizes = [self.bytes(axis, kind, phase) for phase in (*PHASES, None)]
        return (*(f"{n:>{EXACT},} {format_bytes(n):>{UNITS}}" for n in sizes), f"{self.messages(axis, kind):,}")

    @classmethod
    def add(cls, axis: str, kind: str, nbytes: int, messages: int = 1) -> None:
        key = axis, kind, current_phase()
        with cls._lock:
            for ledger in cls.opened:
                ledger.entries[key] += nbytes
                ledger.sends[key] += messages


def _total(counts: Counter[Key], query: tuple[str | None, str | None, str | None]) -> int:
    axis, kind, phase = query
    if not isinstance(axis, str | None):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"axis={axis!r}: the name of an axis is needed, such as 'ring'")
    for name, value, choices in (("kind", kind, KINDS), ("phase", phase, PHASES)):
        check_choice(name, choices[0] if value is None else value, choices)
    return sum(n for key, n in counts.items() if all(q in (None, k) for q, k in zip(query, key, strict=True)))


def current_phase() -> str:
    return _phase.get()


@contextmanager
def phase(name: str) -> Generator[None]:
    """Context manager that counts the bytes sent by this thread under the phase `name`."""
    token = _phase.set(name)
    try:
        yield
    finally:
        _phase.reset(token)


def format_bytes(size: int) -> str:
    """Formats bytes in the largest unit that gives at least 1, with three decimals: 1.625 GiB."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:,.3f} {unit}"
    return f"{size} B"
