"""Counting the bytes that this rank sends."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ClassVar, Self

from armillary.core.validation import check_choice

Key = tuple[str, str, str]
"""(axis, kind, phase)."""

KINDS = ("p2p", "all_to_all", "all_gather", "reduce_scatter")
PHASES = ("forward", "backward")
EXACT, UNITS = 15, 11
NUMBERS = EXACT + 1 + UNITS
"""Widths of the table's columns: exact bytes, bytes with a unit, both."""

_phase: ContextVar[str] = ContextVar("phase", default="forward")


@dataclass
class CommLedger:
    """While it is open, counts the bytes that this process sends through the primitives of `armillary.core`.

        with CommLedger() as ledger:
            attend(q, k, v, mask=mask, layout=layout).backward(dout)
        ledger.bytes(axis="ring", phase="backward")
        print(ledger.table())

    axis     kind                            forward                     backward                        total  messages
    ring     p2p                  49,152  48.000 KiB          122,880 120.000 KiB          172,032 168.000 KiB         9
    ulysses  all_to_all           65,536  64.000 KiB           65,536  64.000 KiB          131,072 128.000 KiB         8
    total                        114,688 112.000 KiB          188,416 184.000 KiB          303,104 296.000 KiB        17

    It sees every thread of the process, because autograd runs backward passes on threads of its own. Bytes that a rank
    keeps for itself are not counted. Ledgers nest; each counts for itself.
    """

    entries: Counter[Key] = field(default_factory=Counter[Key])
    """Bytes by (axis, kind, phase)."""
    sends: Counter[Key] = field(default_factory=Counter[Key])
    """Messages, likewise."""

    opened: ClassVar[list[CommLedger]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __enter__(self) -> Self:
        with self._lock:
            self.opened.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.opened[:] = [ledger for ledger in self.opened if ledger is not self]

    def bytes(self, axis: str | None = None, kind: str | None = None, phase: str | None = None) -> int:
        """Bytes sent on one axis, by one kind, in one phase ("forward", "backward"); None: all.

        Kinds are "p2p", "all_to_all", "all_gather" and "reduce_scatter". The latter goes out as an all-to-all, and is
        summed by who receives it: in rank order, and in float32 at least.

        Raises:
            ValueError: a kind or a phase that there is none of, or an axis that is no name.
        """
        return _total(self.entries, (axis, kind, phase))

    def messages(self, axis: str | None = None, kind: str | None = None, phase: str | None = None) -> int:
        """How many messages that was: one for each rank that an exchange or a collective sends something to."""
        return _total(self.sends, (axis, kind, phase))

    def table(self) -> str:
        """Bytes by axis and kind, forward, backward and together, exactly and in units; as in the example above."""
        rows = sorted({(axis, kind) for (axis, kind, _), sent in self.entries.items() if sent})
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
        sent = [self.bytes(axis, kind, phase) for phase in (*PHASES, None)]
        return (*(f"{n:>{EXACT},} {format_bytes(n):>{UNITS}}" for n in sent), f"{self.messages(axis, kind):,}")

    @classmethod
    def add(cls, axis: str, kind: str, sent: int, messages: int = 1) -> None:
        key = axis, kind, current_phase()
        with cls._lock:
            for ledger in cls.opened:
                ledger.entries[key] += sent
                ledger.sends[key] += messages


def _total(counts: Counter[Key], wanted: tuple[str | None, str | None, str | None]) -> int:
    axis, kind, phase = wanted
    if not isinstance(axis, str | None):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are people too
        raise ValueError(f"axis={axis!r}: the name of an axis is needed, such as 'ring'")
    for name, word, known in (("kind", kind, KINDS), ("phase", phase, PHASES)):
        check_choice(name, known[0] if word is None else word, known)
    return sum(n for key, n in counts.items() if all(w in (None, k) for w, k in zip(wanted, key, strict=True)))


def current_phase() -> str:
    """The phase in which this thread is."""
    return _phase.get()


@contextmanager
def phase(name: str) -> Generator[None]:
    """Books what is sent meanwhile, on this thread, under the phase `name`."""
    token = _phase.set(name)
    try:
        yield
    finally:
        _phase.reset(token)


def format_bytes(size: int) -> str:
    """Bytes in the unit that leaves at least 1 of it, to three decimals: 1.625 GiB."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:,.3f} {unit}"
    return f"{size} B"
