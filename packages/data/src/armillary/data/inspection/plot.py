"""A picture of a store; needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from armillary.core.files import writing
from armillary.data.inspection.statistics import describe, histogram
from armillary.data.optional import optional
from armillary.data.store import TokenStore


def check_picture(path: Path, flag: str) -> None:
    """Refuses early where no PNG can be written.

    Raises:
        ValueError: another suffix, a folder, or a path in a folder that is not there; names the flag.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"{flag} {path}: pictures are PNGs; give a name that ends in .png")
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"{flag} {path}: {why}; give the path of a file to be made")


def plot_lengths(store: TokenStore, path: Path) -> None:
    """Documents, and tokens in them, by the length of documents, as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figures = optional("matplotlib.figure", "plot")
    bins, found = histogram(store.lengths), describe(store)
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    lefts, widths = [max(b.least, 0.5) for b in bins], [b.most + 1 - max(b.least, 0.5) for b in bins]
    for name, counts, color in (
        ("documents", [b.documents for b in bins], "tab:blue"),
        ("tokens", [b.tokens for b in bins], "tab:orange"),
    ):
        shares = [count / max(sum(counts), 1) for count in counts]
        axes.bar(
            lefts, shares, widths, align="edge", alpha=0.5, color=color, edgecolor="white", label=f"share of {name}"
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens in a document")
    axes.yaxis.set_major_formatter(optional("matplotlib.ticker", "plot").PercentFormatter(1))
    axes.set_title(f"{Path(store.name).name}: {found['documents']:,} documents, {found['tokens']:,} tokens")
    axes.legend()
    with writing(path):
        figure.savefig(path, format="png", dpi=120)
