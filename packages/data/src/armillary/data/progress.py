"""The progress bar of commands, on stderr."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LOG_INTERVAL = 0.1
"""Fraction of the work between two lines of a log."""


class Bar(Progress):
    """A progress bar on a terminal, removed when the work is done. Printed lines appear above it.

    Args:
        description: name of the work; `show` may change it.
        in_bytes: True if counts are bytes, shown as MB.
        lines: True prints a line after each tenth of the work, counted in bytes, if stderr is not a terminal.
        quiet: True shows nothing, such as with --json.
    """

    def __init__(
        self, description: str = "", *, in_bytes: bool = False, lines: bool = False, quiet: bool = False
    ) -> None:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("left {task.fields[note]}", markup=False),
            console=console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            disable=quiet or not console.is_terminal,
        )
        self._bar = self.add_task(description, total=None, amount="", note="")
        self._in_bytes, self._is_log = in_bytes, lines and not quiet and not console.is_terminal
        self._logged = 0.0

    def show(self, description: str, count: int = 0, total: int | None = None, note: str = "") -> None:
        """Updates the bar. A total of None is unknown: the bar then shows no amount."""
        amount = f"{count / 1e6:,.1f}/{(total or 0) / 1e6:,.1f} MB" if self._in_bytes else f"{count:,}/{total or 0:,}"
        amount = "" if total is None else amount
        self.update(self._bar, description=description, completed=count, total=total, amount=amount, note=note)
        fraction = count / max(total or 0, 1)
        if self._is_log and total is not None and self._logged < fraction >= min(self._logged + LOG_INTERVAL, 1.0):
            self._logged = fraction
            self.console.print(f"{description}: {fraction:.0%} of {total:,} bytes {note}".rstrip(), markup=False)
