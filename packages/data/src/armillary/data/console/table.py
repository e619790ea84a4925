"""Tables of plain text: as wide as they need to be on a pipe, wrapped between words on a terminal, and never cut."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

GAP = "  "


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        head: with the unit of its numbers.
        text: whether cells are words, which stand to the left and may be wrapped; numbers do neither.
        below: where the table is wider than the terminal, these cells stand on lines of their own, below their rows.
    """

    head: str
    text: bool = False
    below: bool = False

    def parts(self, cell: str, width: int) -> list[str]:
        return wrapped(cell, width) if self.text else [cell]


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table on stdout, as wide as the terminal if that is one."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(table(columns, rows, width), flush=True)


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int | None = None) -> str:
    """Lines of cells under their heads.

    Args:
        rows: a cell for each column; an empty row is a ruled line.
        width: characters of a line. Where words or numbers would have to be cut, the table is wider.
    """
    rows, below = list(rows), list[int]()
    if width is not None and span(widths_of(columns, rows)) > width:
        below = [i for i, column in enumerate(columns) if column.below]
    kept = [i for i in range(len(columns)) if i not in below]
    shown, cells = [columns[i] for i in kept], [[row[i] for i in kept if row] for row in rows]
    widths = widths_of(shown, cells, width)
    heads = [wrapped(column.head, size) for column, size in zip(shown, widths, strict=True)]
    height = max(map(len, heads))
    rule = GAP.join("-" * size for size in widths)
    lines = [*stacked(shown, [[""] * (height - len(head)) + head for head in heads], widths), rule]
    for row, kept_cells in zip(rows, cells, strict=True):
        if not row:
            lines.append(rule)
            continue
        parts = [column.parts(cell, size) for column, cell, size in zip(shown, kept_cells, widths, strict=True)]
        lines += stacked(shown, parts, widths)
        said = [f"{columns[i].head}: {row[i]}" for i in below if row[i]]
        lines += [f"    {part}" for cell in said for part in wrapped(cell, (width or 0) - 4)]
    return "\n".join(lines)


def widths_of(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> list[int]:
    """Characters of each column, made narrower until all fit or none can be: heads of numbers first, then words."""
    cells = [[row[i] for row in rows if row] for i in range(len(columns))]
    widths = [longest([column.head, *found]) for column, found in zip(columns, cells, strict=True)]
    least = [
        longest([*column.head.split(), *(part for cell in found for part in column.parts(cell, 1))])
        for column, found in zip(columns, cells, strict=True)
    ]
    while width is not None and span(widths) > width and widths != least:
        wide = [i for i in range(len(widths)) if widths[i] > least[i]]
        widest = max(wide, key=lambda i: (not columns[i].text, widths[i]))
        widths[widest] -= 1
    return widths


def stacked(columns: Sequence[Column], cells: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    """A row in as many lines as its tallest cell, each cell in parts."""
    for i in range(max(map(len, cells))):
        parts = [cell[i] if i < len(cell) else "" for cell in cells]
        aligned = zip(columns, parts, widths, strict=True)
        yield GAP.join(part.ljust(size) if column.text else part.rjust(size) for column, part, size in aligned).rstrip()


def span(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def wrapped(text: str, width: int) -> list[str]:
    """Text in lines, broken between words alone."""
    return wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False) or [""]


def longest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)
