"""A plot of the lengths of documents; needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from armillary.data.console.picture import picture
from armillary.data.inspection.statistics import histogram
from armillary.data.store import TokenStore


def plot_lengths(store: TokenStore, path: Path) -> None:
    """Draws the shares of documents and of tokens by the length of documents.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    bins = histogram(store.lengths)
    edges = [max(b.minimum, 0.5) for b in bins]  # a logarithmic axis has no 0
    widths = [b.maximum + 1 - edge for b, edge in zip(bins, edges, strict=True)]
    with picture(path, (8, 4.5), "armillary-data") as figure:
        axes = figure.subplots()
        for name, color in (("documents", "tab:blue"), ("tokens", "tab:orange")):
            counts = [getattr(b, name) for b in bins]
            percents = [100 * count / max(sum(counts), 1) for count in counts]
            style = {"align": "edge", "alpha": 0.5, "color": color, "edgecolor": "white"}
            axes.bar(edges, percents, widths, label=f"share of {name}", **style)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens in a document")
        axes.yaxis.set_major_formatter("{x:g}%")
        axes.set_title(f"{Path(store.name).name}: {len(store):,} documents, {store.tokens:,} tokens")
        axes.legend()
