"""Reports of benchmarks: a JSON file and a table, each with its command line."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks"


def write(
    name: str,
    title: str,
    rows: Sequence[dict[str, Any]],
    notes: Sequence[str] = (),
    folder: Path = RESULTS,
    command: str | None = None,
) -> str:
    """Writes `name`.json and .md to `folder` and returns the table. All rows have the same keys.

    `command` is shown as the command line; by default that of this process.
    """
    command = command or shlex.join(["python", str(Path(sys.argv[0]).as_posix()), *sys.argv[1:]])
    machine = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}"
    table = f"# {title}\n\n    {command}\n\n{machine}\n\n{as_table(rows)}\n" + "".join(f"\n- {note}" for note in notes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(table.rstrip() + "\n")
    data = {"title": title, "command": command, "machine": machine, "rows": rows, "notes": notes}
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    return table


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with aligned columns."""
    lines = [list(rows[0]), *([show(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    shown = [f"| {' | '.join(cells)} |" for cells in padded]
    return "\n".join([shown[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *shown[1:]])


def show(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def median_ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Median of the ratios of paired runs, in which other load on the machine cancels."""
    return median(a / b for a, b in zip(times, base, strict=True))
