"""Plain-text tables: as wide as needed on a pipe, and wrapped between words on a terminal. No text is cut.

rich's tables cannot put a cell below its row (`Column.own_line`), and cut words that are wider than their column.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from armillary.data.console.exit import print_lines

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
    # 1. If the table is too wide, some columns are printed below their rows.
    rows, on_own_lines = list(rows), list[Column]()
    if width is not None and line_width(column_widths(columns, rows)) > width:
        on_own_lines = [column for column in columns if column.own_line]
    # 2. The widths of the columns in the rows, and the lines of their heads, aligned at the bottom.
    inline = [i for i, column in enumerate(columns) if column not in on_own_lines]
    shown, cells = [columns[i] for i in inline], [[row[i] for i in inline if row] for row in rows]
    widths = column_widths(shown, cells, width)
    heads = [wrap_words(column.head, size) for column, size in zip(shown, widths, strict=True)]
    height = max(map(len, heads))
    rule = GAP.join("-" * size for size in widths)
    lines = [*join_cells(shown, [[""] * (height - len(head)) + head for head in heads], widths), rule]
    # 3. Each row, and below it the cells that have lines of their own.
    for row, inline_cells in zip(rows, cells, strict=True):
        if not row:
            lines.append(rule)
            continue
        wrapped = [column.lines(cell, size) for column, cell, size in zip(shown, inline_cells, widths, strict=True)]
        lines += join_cells(shown, wrapped, widths)
        for column, cell in zip(columns, row, strict=True):
            if column in on_own_lines and cell:
                lines += [f"    {line}" for line in wrap_words(f"{column.head}: {cell}", (width or 0) - 4)]
    return "\n".join(lines)


def column_widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> list[int]:
    """Returns the width of each column in characters, reduced as far as words allow until a line has at most `width`.

    Columns of numbers, whose heads wrap, are reduced before columns of words; of each kind the widest first.
    """
    cells = [[row[i] for row in rows if row] for i in range(len(columns))]
    widths = [longest([column.head, *texts]) for column, texts in zip(columns, cells, strict=True)]
    minima = [
        longest([*column.head.split(), *(line for cell in texts for line in column.lines(cell, 1))])
        for column, texts in zip(columns, cells, strict=True)
    ]
    while width is not None and line_width(widths) > width and widths != minima:
        reducible = [i for i in range(len(widths)) if widths[i] > minima[i]]
        widths[max(reducible, key=lambda i: (not columns[i].text, widths[i]))] -= 1
    return widths


def join_cells(columns: Sequence[Column], cells: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    """Yields the lines of a row, given the lines of each cell. The tallest cell determines their number."""
    for i in range(max(map(len, cells))):
        texts = [cell[i] if i < len(cell) else "" for cell in cells]
        aligned = zip(columns, texts, widths, strict=True)
        yield GAP.join(text.ljust(size) if column.text else text.rjust(size) for column, text, size in aligned).rstrip()


def line_width(widths: Sequence[int]) -> int:
    """Returns the characters of a line with columns of these widths."""
    return sum(widths) + len(GAP) * (len(widths) - 1)


def wrap_words(text: str, width: int) -> list[str]:
    """Returns the lines of a text that is broken between words only."""
    return wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False) or [""]


def longest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)
