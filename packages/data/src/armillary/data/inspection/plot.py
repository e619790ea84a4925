"""A plot of the lengths of documents; needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from armillary.core.files import writing
from armillary.data.inspection.statistics import histogram
from armillary.data.optional import optional
from armillary.data.store import TokenStore


def check_picture(path: Path, flag: str) -> None:
    """Raises before any work if no PNG can be written to `path`.

    Raises:
        ValueError: another suffix, a folder, or a missing parent folder. The message names `flag`.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"{flag} {path}: pictures are PNGs; give a name that ends in .png")
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"{flag} {path}: {reason}; give the path of a new file")


def plot_lengths(store: TokenStore, path: Path) -> None:
    """Draws the shares of documents and of tokens by the length of documents.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figures = optional("matplotlib.figure", "plot")
    bins = histogram(store.lengths)
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    edges = [max(b.least, 0.5) for b in bins]  # a logarithmic axis has no 0
    widths = [b.most + 1 - edge for b, edge in zip(bins, edges, strict=True)]
    for name, color in (("documents", "tab:blue"), ("tokens", "tab:orange")):
        counts = [getattr(b, name) for b in bins]
        fractions = [count / max(sum(counts), 1) for count in counts]
        style = {"align": "edge", "alpha": 0.5, "color": color, "edgecolor": "white"}
        axes.bar(edges, fractions, widths, label=f"share of {name}", **style)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens in a document")
    axes.yaxis.set_major_formatter(optional("matplotlib.ticker", "plot").PercentFormatter(1))
    axes.set_title(f"{Path(store.name).name}: {len(store):,} documents, {store.tokens:,} tokens")
    axes.legend()
    with writing(path):
        figure.savefig(path, format="png", dpi=120)
