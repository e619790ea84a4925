"""How far long work is, for whoever waits for it: a bar on stderr, the same for all commands."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

EVERY = 0.1
"""Where there is no terminal, a line is printed for each such share of the work."""


class Bar:
    """A bar on a terminal, gone when the work is done. Elsewhere nothing, or lines. What is printed stands above it.

    Args:
        doing: what is being done; `show` may say something else.
        in_bytes: what is counted are bytes.
        lines: without a terminal, a line now and then, for the log of work that takes hours.
        quiet: nothing at all, such as for --json, or on all ranks but one.
    """

    def __init__(self, doing: str = "", *, in_bytes: bool = False, lines: bool = False, quiet: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        shown = self.console.is_terminal and not quiet
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", markup=False),
            console=self.console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            disable=not shown,
        )
        self.task = self.bar.add_task(doing, total=None, note="", amount="", left="")
        self._in_bytes = in_bytes
        self._lines, self._printed = lines and not quiet and not self.console.is_terminal, 0.0

    def show(self, doing: str, done: int = 0, total: int | None = None, note: str = "") -> None:
        """Shows how far it is; a total of None: nobody knows."""
        amount = "" if total is None else self._amount(done, total)
        left = "" if total is None else "left"
        self.bar.update(self.task, description=doing, completed=done, total=total, note=note, amount=amount, left=left)
        share = done / max(total or 0, 1)
        if self._lines and total is not None and self._printed < share >= min(self._printed + EVERY, 1.0):
            self._printed = share
            self.console.print(f"{doing}: {share:.0%} of {total:,} bytes {note}".rstrip(), markup=False)

    def _amount(self, done: int, total: int) -> str:
        return f"{done / 1e6:,.1f}/{total / 1e6:,.1f} MB" if self._in_bytes else f"{done:,}/{total:,}"

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
