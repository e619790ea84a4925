"""Rows with a paper's figure and ours, and their page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import report

NOT_AVAILABLE = "not available"
"""Figure of curves without values in the paper's text."""
TOLERANCE = 0.05
"""Largest deviation of a ratio from 1 without a reason."""

Figure = float | int | str | None


@dataclass(frozen=True)
class Row:
    """One figure of a paper with ours.

    Args:
        why: numeric reason for a ratio further than `TOLERANCE` from 1.

    Raises:
        ValueError: a ratio beyond the tolerance without a number in `why`.
    """

    what: str
    paper: Figure
    ours: Figure
    why: str = ""

    def __post_init__(self) -> None:
        ratio = self.ratio
        if ratio is not None and abs(ratio - 1) > TOLERANCE and not any(map(str.isdigit, self.why)):
            raise ValueError(f"{self.what}: ratio {ratio:.3f} needs a reason with a number, not {self.why!r}")

    @property
    def ratio(self) -> float | None:
        """Our figure over the paper's; None if one of them is not a number."""
        numbers = isinstance(self.paper, (float, int)) and isinstance(self.ours, (float, int))
        return self.ours / self.paper if numbers and self.paper else None

    def cells(self) -> dict[str, Any]:
        """Cells of the page and of the JSON file."""
        figures = {"paper": self.paper, "ours": self.ours, "ratio": self.ratio}
        shown = {name: f"{x:.4g}" if isinstance(x, float) else "-" if x is None else x for name, x in figures.items()}
        return {"what": self.what, **shown, "why": self.why}


@dataclass(frozen=True)
class Table:
    """A section of the page: a table or figure of a paper."""

    title: str
    text: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The section, its heading included."""
        table = report.as_table([row.cells() for row in self.rows])
        notes = "".join(f"\n- {note}" for note in self.notes)
        return "\n\n".join(part for part in (f"### {self.title}", self.text, table, notes.strip()) if part)


@dataclass(frozen=True)
class Paper:
    """All tables of a paper."""

    name: str
    arxiv: str
    tables: Sequence[Table]

    def markdown(self) -> str:
        """The paper's part of the page."""
        heading = f"## {self.name} (arXiv {self.arxiv})"
        return "\n\n".join([heading, *(table.markdown() for table in self.tables)])


def flat_rows(papers: Iterable[Paper]) -> list[dict[str, Any]]:
    """Rows of all tables, each with the paper's and the table's name."""
    return [
        {"paper's table": f"{paper.name}, {table.title}", **row.cells()}
        for paper in papers
        for table in paper.tables
        for row in table.rows
    ]
