"""All races in one picture, from their reports: measured and predicted speed-ups over Ring.

uv run python benchmarks/cluster/picture.py
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report
from contenders import RACES
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from armillary.plan import Cluster

WON, LOST = "C0", "C1"
TICKS = (0.2, 0.5, 1, 2, 5, 10, 20)
TEXT = {"va": "center", "fontsize": 8}


def draw(folder: Path = report.RESULTS) -> Path:
    """Draws the clusters with reports in `folder`, one row each, with a panel for each shape."""
    races = {name: result for name in RACES if (result := measured(name, folder))}
    width = max(len(panels) for panels in races.values())
    figure = Figure((4.6 * width, 2.6 * len(races)), layout="constrained")
    rows = figure.subplots(len(races), width, squeeze=False)
    for row, (name, panels) in zip(rows, races.items(), strict=True):
        for axis, panel in zip(row, panels, strict=False):
            fill(axis, panel)
            axis.set_title(panel[0]["shapes"], loc="left", fontsize=9)
        for axis in row[len(panels) :]:
            axis.set_visible(False)
        row[0].set_title(
            f"{Cluster.named(name).name.removeprefix('emulated: ')}\n{panels[0][0]['shapes']}", loc="left", fontsize=9
        )
    figure.suptitle(
        "Tokens a second as a multiple of Ring's: bars as measured, marks as the planner has it", fontsize=11
    )
    figure.savefig(path := folder / "cluster.png", dpi=100)
    return path


def measured(name: str, folder: Path) -> list[list[dict[str, Any]]]:
    """Rows of a report grouped by shapes, or [] without a report."""
    file = folder / f"cluster-{name.removeprefix('emulated-')}.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return [list(panel) for _, panel in groupby(rows, key=lambda row: row["shapes"])]


def fill(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Draws bars from Ring to the measured speed and marks at the predicted speed, the fastest on top."""
    rows = sorted(rows, key=lambda row: row["over ring"])
    places, gains = range(len(rows)), [row["over ring"] for row in rows]
    axis.barh(places, [gain - 1 for gain in gains], left=1, color=[WON if gain > 1 else LOST for gain in gains])
    axis.plot([row["predicted over ring"] for row in rows], places, "|", color="black", ms=13, mew=1.5)
    for place, row in zip(places, rows, strict=True):
        axis.text(
            1.08 * max(1.0, row["over ring"], row["predicted over ring"]), place, f"{row['over ring']:.2f}", **TEXT
        )
    axis.set_yticks(places, [row["contender"] for row in rows])
    axis.set_xscale("log")
    axis.set_xlim(min(0.45, 0.8 * gains[0]), max(2.5, 1.7 * gains[-1]))
    axis.set_xticks([tick for tick in TICKS if axis.get_xlim()[0] <= tick <= axis.get_xlim()[1]])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    print(draw())
