"""Plot of the best candidates; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from armillary.core.files import writing
from armillary.data.optional import optional
from armillary.plan.search.report import heading, keeps
from armillary.plan.search.search import SearchResult

SMALL = 0.002
"""Share of the slowest step below which a part is not drawn."""


def draw(found: SearchResult, path: Path) -> Path:
    """Draws the best choices as bars of what their time goes to, as a PNG at `path`, which is returned.

    Raises:
        ValueError: nothing fits.
        ImportError: matplotlib is not installed.
        OSError: the picture cannot be written.
    """
    best = found.fitting[: found.plan.best]
    if not best:
        raise ValueError("--plot: nothing fits, so that there is nothing to draw")
    size = (11, 2.2 + 0.5 * len(best))
    figure = optional("matplotlib.figure", "plot", package="armillary-plan").Figure(size, layout="constrained")
    axes = figure.subplots()
    bars(axes, found)
    axes.set_yticks(range(len(best)), [f"{choice.candidate}\n{keeps(choice)}" for choice in best], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step, predicted")
    axes.set_title("\n".join(heading(found)), fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    with writing(path):
        figure.savefig(path, dpi=120)
    return path


def bars(axes: Any, found: SearchResult) -> None:
    """A bar for each choice, in parts; its MFU at the end."""
    best = found.fitting[: found.plan.best]
    ends = [0.0] * len(best)
    for i, name in enumerate(best[0].time.parts()):
        widths = [choice.time.parts()[name] for choice in best]
        if max(widths) > SMALL * best[-1].time.seconds:
            axes.barh(range(len(best)), widths, left=ends, label=name, color=f"C{i}")
        ends = [a + b for a, b in zip(ends, widths, strict=True)]
    for i, choice in enumerate(best):
        axes.text(ends[i], i, f" {choice.mfu:.1%} MFU", va="center", fontsize=8)
