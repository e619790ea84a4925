"""Plots of the lengths of documents, and of a row in each layout. They need matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from armillary.data.console.picture import picture
from armillary.data.inspection.layouts import LAYOUTS, layout_for, measure_layouts
from armillary.data.inspection.statistics import histogram
from armillary.data.loader.epochs import PackedRow
from armillary.data.store import TokenStore

PICTURE_COLUMNS = 2000
"""Maximum number of positions that are drawn of a row, spread evenly over it."""


def plot_lengths(store: TokenStore, path: Path) -> None:
    """Draws a histogram of the lengths of documents: the percentages of documents and of tokens in each bin.

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


def plot_layouts(row: PackedRow, shards: int, token_bytes: int, path: Path) -> None:
    """Draws a row in each layout: a bar of its positions, colored by shard, beside the bytes sent and the balance.

    Args:
        token_bytes: bytes sent per token and hop, forward and backward.

    Raises:
        ValueError: more shards than tokens.
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    measured = {each.layout: each for each in measure_layouts([row], shards, token_bytes)}
    names, length = [name for name in LAYOUTS if name in measured], row.ends[-1]
    columns = min(length, PICTURE_COLUMNS)
    owners = np.zeros((len(names), columns))  # the shard of each drawn position
    for i, name in enumerate(names):
        layout = layout_for(name, row, shards)
        assert layout is not None
        owners[i] = layout.shards_at(np.arange(columns) * length // columns)
    with picture(path, (11, 1.2 + 0.75 * len(names)), "armillary-data") as figure:
        axes, bars, balances = figure.subplots(1, 3, width_ratios=[5, 1, 1], sharey=True)
        for i in range(len(names)):
            axes.imshow(
                owners[i : i + 1],
                cmap="turbo",
                vmin=0,
                vmax=max(shards - 1, 1),
                aspect="auto",
                interpolation="nearest",
                extent=(0, length, i + 0.35, i - 0.35),
            )
        axes.vlines(row.ends, -0.5, len(names) - 0.5, color="black", linewidth=0.6)
        axes.set_xlim(0, length)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel(f"position; black lines end documents; a color for each of {shards} shards")
        sent_mib = [measured[name].sent_bytes / 2**20 for name in names]
        pairs = [measured[name].pairs for name in names]
        for panel, values, label, text in (
            (bars, sent_mib, "sent by a rank\n(MiB)", "{:.0f}"),
            (balances, pairs, "pairs, fullest shard\nover the mean", "{:.2f}"),
        ):
            panel.bar_label(panel.barh(range(len(names)), values, 0.7, color="tab:gray"), map(text.format, values))
            panel.set_xlabel(label)
            panel.margins(x=0.35)
            panel.spines[["top", "right"]].set_visible(False)
