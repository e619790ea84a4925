"""Output of commands: plain-text tables, pictures as PNGs, and a progress bar on stderr."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from armillary.core.internal import write_whole
from armillary.data.console.exit import print_lines
from armillary.data.errors import optional

# -- tables -----------------------------------------------------------------------------------------------------------

GAP = "  "


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        head: title of the column, with the unit of its numbers.
        text: True for words, which are aligned to the left and wrapped if needed. Numbers are aligned to the right.
        own_line: True prints each cell on a line of its own, below its row, if the table is wider than the terminal.
    """

    head: str
    text: bool = False
    own_line: bool = False

    def lines(self, cell: str, width: int) -> list[str]:
        """Returns the lines of a cell in a column of `width` characters."""
        return wrap_words(cell, width) if self.text else [cell]


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table on stdout, wrapped to the width of the terminal if there is one."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print_lines(table(columns, rows, width))


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int | None = None) -> str:
    """Returns a table as text.

    Args:
        rows: a cell for each column; an empty row is a ruled line.
        width: largest number of characters in a line. The table is wider if a word or number would be cut otherwise.
    """
    # Not rich's tables, which cannot put a cell below its row and cut words that are wider than their column.
    # 1. If the table is too wide, some columns are printed below their rows.
    rows, inline = list(rows), list(range(len(columns)))
    if width is not None and line_width(column_widths(columns, rows)) > width:
        inline = [i for i in inline if not columns[i].own_line]
    # 2. The widths of the columns in the rows.
    shown, cells = [columns[i] for i in inline], [[row[i] for i in inline if row] for row in rows]
    widths = column_widths(shown, cells, width)

    def add_line(wrapped: Sequence[Sequence[str]]) -> None:
        """Adds a row, given the lines of each cell. The tallest cell determines their number."""
        for i in range(max(map(len, wrapped))):
            texts = [cell[i] if i < len(cell) else "" for cell in wrapped]
            aligned = [
                text.ljust(size) if column.text else text.rjust(size)
                for column, text, size in zip(shown, texts, widths, strict=True)
            ]
            lines.append(GAP.join(aligned).rstrip())

    # 3. The heads, aligned at the bottom; then each row, and below it the cells that have lines of their own.
    lines, rule = list[str](), GAP.join("-" * size for size in widths)
    heads = [wrap_words(column.head, size) for column, size in zip(shown, widths, strict=True)]
    add_line([[""] * (max(map(len, heads)) - len(head)) + head for head in heads])
    lines.append(rule)
    for row, inline_cells in zip(rows, cells, strict=True):
        if not row:
            lines.append(rule)
            continue
        add_line([column.lines(cell, size) for column, cell, size in zip(shown, inline_cells, widths, strict=True)])
        for i, (column, cell) in enumerate(zip(columns, row, strict=True)):
            if i not in inline and cell:
                lines += [f"    {line}" for line in wrap_words(f"{column.head}: {cell}", (width or 0) - 4)]
    return "\n".join(lines)


def column_widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> list[int]:
    """Returns the width of each column in characters, reduced as words allow until a line has at most `width`."""
    widths, minima = list[int](), list[int]()
    for i, column in enumerate(columns):
        cells = [row[i] for row in rows if row]
        widths.append(max(map(len, [column.head, *cells])))
        words = [*column.head.split(), *(line for cell in cells for line in column.lines(cell, 1))]
        minima.append(max(map(len, words), default=0))
    while width is not None and line_width(widths) > width and widths != minima:
        # Columns of numbers, whose heads wrap, before columns of words; of each kind the widest first.
        reducible = [i for i in range(len(widths)) if widths[i] > minima[i]]
        widths[max(reducible, key=lambda i: (not columns[i].text, widths[i]))] -= 1
    return widths


def line_width(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def wrap_words(text: str, width: int) -> list[str]:
    """Returns the lines of a text that is broken between words only."""
    return wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False) or [""]


# -- pictures ---------------------------------------------------------------------------------------------------------


def check_picture(path: Path, flag: str) -> None:
    """Raises ValueError, which names `flag`, unless a PNG can be written to the path."""
    # Called before the work, so that a command does not fail at its end.
    if path.suffix.lower() != ".png":
        raise ValueError(f"{flag} {path}: pictures are PNGs; give a name that ends in .png")
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"{flag} {path}: {reason}; give the path of a file to write")


def print_written(path: Path) -> None:
    print(f"written to {path}", file=sys.stderr)  # stdout may be JSON


@contextmanager
def picture(path: Path, size: tuple[float, float], package: str) -> Generator[Any]:
    """Context manager that yields a figure of `size` inches, and writes it to `path` if the block raises no error.

    Raises ImportError if matplotlib is not installed: the extra `plot` of `package`.
    """
    figure = optional("matplotlib.figure", "plot", package).Figure(size, layout="constrained")
    yield figure
    write_whole(path, lambda partial: figure.savefig(partial, format="png", dpi=120))


# -- progress ---------------------------------------------------------------------------------------------------------

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
