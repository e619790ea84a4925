"""A mask as a picture; with a layout, who holds what and who computes what besides. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from armillary.attention.drawing.cells import areas_of, cell_edges, count_cells, held
from armillary.attention.drawing.colors import blended, colors_of, light_colors
from armillary.attention.drawing.computed_cells import ComputedCells, has_steps
from armillary.attention.drawing.shares import Shares, blocks_of, shares_of
from armillary.attention.mask import AttentionMask, Blocks, ImageSpans, Tree
from armillary.attention.registry import DEFAULT_OPTIONS, MethodOptions
from armillary.core import SequenceLayout
from armillary.core.files import writing
from armillary.core.optional import optional
from armillary.core.slices import Integers, Slices

CELLS = 192
"""To a side, of sequences with more tokens."""
FORMATS = (".png", ".svg", ".pdf")
MIXED = 64
"""To a side, where neighbouring positions are of several ranks, so that each cell has pairs of all of them."""


def draw_mask(
    mask: AttentionMask,
    length: int,
    path: str | Path,
    layout: SequenceLayout | None = None,
    method: str = "ring",
    row: int = 0,
    options: MethodOptions = DEFAULT_OPTIONS,
) -> Shares | None:
    """Draws who sees whom; with a layout, which rank holds which positions and which computes what at which step too.

    A sequence of any length: from `CELLS` tokens on, a cell stands for many, the fainter the fewer of its pairs are
    visible.

    Args:
        length: tokens of the sequence.
        path: of the picture to be written, .png, .svg or .pdf.
        layout: of the sequence axis: one shard for each of its ranks.
        method: a name of `build_attention`. The ranks of a head axis share what is shown as one rank's.
        row: of the batch, where rows have masks of their own.
        options: of the method, such as WallFacer's team.

    Returns:
        What the picture shows in numbers, where there is a layout.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a mask or layout of another length, a method that does not fit the layout, or another suffix.
        OSError: the file cannot be written.
    """
    path = checked_path(Path(path))
    if layout is not None and layout.length != length:
        raise ValueError(f"the layout has {layout.length} tokens; the mask is to be drawn for {length}")
    mask.pairs(length, row)  # refuses what does not fit
    shares = None if layout is None else shares_of(mask, layout, method, row, options)
    Figure = optional("matplotlib.figure", "plot", "armillary-attention").Figure
    mask, edges = mask.row(row), cell_edges(length, CELLS)
    if layout is None or shares is None:
        figure = Figure((4.2, 4.3), layout="constrained")
        draw_structure(figure.subplots(), mask, edges)
    else:
        figure = Figure((12, 4.4), layout="constrained")
        panels = figure.subplot_mosaic("ABC;ABD", width_ratios=[1, 1, 0.75], height_ratios=[1, 1])
        draw_structure(panels["A"], mask, edges)
        coarse = cell_edges(length, MIXED if has_steps(layout) and length > CELLS else CELLS)
        cells = ComputedCells.of(blocks_of(layout, mask, method, options), mask, coarse, layout.shards)
        draw_computed(panels["B"], cells, f"who computes what, at which step: {method}")
        draw_layout(panels["C"], layout, edges)
        draw_shares(panels["D"], shares)
    with writing(path):
        figure.savefig(path, dpi=110)
    return shares


def checked_path(path: Path) -> Path:
    """Refuses early where no picture can be written."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: pictures are {', '.join(FORMATS)}; give a name that ends so")
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"{path}: {why}; give the path of a file to be made")
    return path


def draw_structure(axes: Any, mask: AttentionMask, edges: Integers) -> None:
    """Who sees whom, in the colours of documents, segments, chunks or slices."""
    length = int(edges[-1])
    slices = mask.slices(length)[0]
    colors = light_colors()
    group = structure_of(mask, slices) % len(colors)
    counts = np.stack([count_cells(slices[group == color], edges) for color in range(len(colors))])
    show_square(axes, blended(counts, areas_of(edges), colors), edges)
    axes.set_title(f"who sees whom: {mask.pairs(length) / length**2:.1%} of all pairs", fontsize=10)


def structure_of(mask: AttentionMask, slices: Slices) -> Integers:
    """What each slice belongs to: a tree's segment, text or image, or itself: a document, a chunk."""
    if isinstance(mask.pattern, Tree):
        return np.searchsorted(np.array(mask.pattern.ends), slices[:, 2], side="right") - 1
    if isinstance(mask.pattern, ImageSpans):
        return (slices[:, 4] > 0).astype(np.int64)
    return np.zeros(len(slices), np.int64) if isinstance(mask.pattern, Blocks) else np.arange(len(slices))


def show_square(axes: Any, cells: Any, edges: Integers) -> None:
    """Queries from above to below, keys from left to right."""
    length = int(edges[-1])
    axes.imshow(cells, extent=(0, length, length, 0), interpolation="nearest", aspect="equal")
    axes.set_xlabel("key position", fontsize=9)
    axes.set_ylabel("query position", fontsize=9)
    plain(axes, both=True)
    if length <= 40:
        axes.set_xticks(range(length + 1), minor=True)
        axes.set_yticks(range(length + 1), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)


def plain(axes: Any, both: bool = False) -> None:
    """Few numbers along the axes, in thousands, millions and so on."""
    ticker = optional("matplotlib.ticker", "plot", "armillary-attention")
    for axis in (axes.xaxis, axes.yaxis) if both else (axes.xaxis,):
        axis.set_major_locator(ticker.MaxNLocator(5, integer=True, steps=[1, 2, 4, 5, 8, 10]))
        axis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.tick_params(which="both", length=0, labelsize=8)
    axes.spines[:].set_color("0.8")


def draw_computed(axes: Any, cells: ComputedCells, title: str) -> None:
    """Each visible pair in the colour of the rank that computes it, with the number of the step."""
    show_square(axes, blended(cells.by_rank, areas_of(cells.edges), cells.colors), cells.edges)
    axes.set_title(title, fontsize=10)
    for x, y, step, color, size in cells.labels():
        axes.text(x, y, str(step), color=color, fontsize=size, ha="center", va="center")


def draw_layout(axes: Any, layout: SequenceLayout, edges: Integers) -> None:
    """A line for each rank, filled where it holds positions."""
    counts = np.stack([held(layout.spans(rank), edges) for rank in range(layout.shards)])
    lines = np.stack([counts * (np.arange(layout.shards) == rank)[:, None] for rank in range(layout.shards)])
    cells = blended(lines, np.diff(edges)[None, :], colors_of(layout.shards))
    axes.imshow(cells, extent=(0, layout.length, layout.shards, 0), interpolation="nearest", aspect="auto")
    axes.set_title("which rank holds which positions", fontsize=10)
    axes.set_xlabel("position", fontsize=9)
    plain(axes)
    rank_ticks(axes, layout.shards, at=0.5)


def draw_shares(axes: Any, shares: Shares) -> None:
    """A bar for each rank, with a line at their mean."""
    ranks, mean = len(shares.by_rank), shares.pairs / len(shares.by_rank)
    axes.barh(range(ranks), shares.by_rank, color=colors_of(ranks), height=0.8)
    axes.axvline(mean, color="0.3", linewidth=1, linestyle="--")
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_title(f"pairs of each rank: max / mean {shares.evenness:.3f}", fontsize=10)
    axes.set_xlabel("(query, key) pairs that it computes", fontsize=9)
    plain(axes)
    axes.spines[["top", "right"]].set_visible(False)
    rank_ticks(axes, ranks, at=0)


def rank_ticks(axes: Any, ranks: int, at: float) -> None:
    """The numbers of ranks, of many only some."""
    shown = range(0, ranks, -(-ranks // 8))
    axes.set_yticks([rank + at for rank in shown], [f"rank {rank}" for rank in shown])
