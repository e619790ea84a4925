"""`draw_mask`: a picture of a mask and, with a layout, of the tokens and the work of each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mask_cells import (
    ComputedCells,
    Shares,
    blocks_of,
    cell_areas,
    cell_edges,
    count_pairs,
    count_positions,
    has_strided_spans,
    shares_of,
)
from matplotlib import ticker
from matplotlib.figure import Figure
from palette import blend, light_colors, rank_colors

from armillary.attention import AttentionMask
from armillary.attention.internal import MethodOptions
from armillary.attention.mask import Blocks, ImageSpans, Tree
from armillary.attention.method_registry import DEFAULT_OPTIONS
from armillary.core import SequenceLayout
from armillary.core.internal import Integers, Slices, writing

CELLS = 192
"""Maximum number of cells per side of a picture."""
MIXED_CELLS = 64
"""The maximum where neighbouring positions are on different ranks: a cell then mixes the colours of several ranks."""
FORMATS = (".png", ".svg", ".pdf")


def draw_mask(
    mask: AttentionMask,
    length: int,
    path: str | Path,
    layout: SequenceLayout | None = None,
    method: str = "ring",
    row: int = 0,
    options: MethodOptions = DEFAULT_OPTIONS,
) -> Shares | None:
    """Draws the visible pairs of a mask; with a layout, also the positions and the computed pairs of each rank.

    In sequences of more than `CELLS` tokens a cell stands for several pairs. The fewer of them are visible, the fainter
    it is.

    Args:
        length: tokens of the sequence.
        path: path of the picture, .png, .svg or .pdf.
        layout: layout over the sequence axis, with one shard for each of its ranks.
        method: a name of `build_attention`. The ranks of a head axis are shown as one.
        row: index of the row in the batch, for masks that differ between rows.
        options: options of the method, such as WallFacer's team.

    Returns:
        The tokens and pairs of each rank, as drawn; None without a layout.

    Raises:
        ValueError: the mask or the layout has another length, the method is unknown or does not fit the layout, the
            suffix of `path` is none of `FORMATS`, or `path` is a folder or in a folder that does not exist.
        IndexError: the mask has no such row.
        OSError: the file cannot be written.
    """
    path = check_path(Path(path))
    if layout is not None and layout.length != length:
        raise ValueError(f"the layout has {layout.length} tokens; the mask is drawn for {length}")
    mask.pairs(length, row)  # raises ValueError if the mask has another length
    rank_shares = None if layout is None else shares_of(mask, layout, method, row, options)
    mask, edges = mask.row(row), cell_edges(length, CELLS)
    if layout is None or rank_shares is None:
        figure = Figure((4.2, 4.3), layout="constrained")
        draw_structure(figure.subplots(), mask, edges)
    else:
        figure = Figure((12, 4.4), layout="constrained")
        panels = figure.subplot_mosaic("ABC;ABD", width_ratios=[1, 1, 0.75], height_ratios=[1, 1])
        draw_structure(panels["A"], mask, edges)
        coarse = cell_edges(length, MIXED_CELLS if has_strided_spans(layout) and length > CELLS else CELLS)
        cells = ComputedCells.of(blocks_of(layout, mask, method, options), mask, coarse, layout.shards)
        draw_computed(panels["B"], cells, f"rank and step that compute each pair: {method}")
        draw_layout(panels["C"], layout, edges)
        draw_shares(panels["D"], rank_shares)
    with writing(path):
        figure.savefig(path, dpi=110)
    return rank_shares


def check_path(path: Path) -> Path:
    """Returns the path. Raises ValueError for an unknown suffix, a path that is a folder, and a missing folder."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: pictures are {', '.join(FORMATS)}")
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"{path}: {reason}; give the path of a new file")
    return path


def draw_structure(axes: Any, mask: AttentionMask, edges: Integers) -> None:
    """Draws visible pairs, coloured by document, segment, chunk or slice."""
    length = int(edges[-1])
    slices, colors = mask.slices(length)[0], light_colors()
    slice_colors = color_numbers(mask, slices) % len(colors)  # colours repeat after the last one
    counts = np.stack([count_pairs(slices[slice_colors == color], edges) for color in range(len(colors))])
    show_square(axes, blend(counts, cell_areas(edges), colors), edges)
    axes.set_title(f"visible pairs: {mask.pairs(length) / length**2:.1%} of all", fontsize=10)


def color_numbers(mask: AttentionMask, slices: Slices) -> Integers:
    """Returns a colour number for each slice. Slices of one segment, of text or of images have the same number."""
    if isinstance(mask.pattern, Tree):  # the index of the segment that the slice's keys are in
        return np.searchsorted(np.array(mask.pattern.ends), slices[:, 2], side="right") - 1
    if isinstance(mask.pattern, ImageSpans):  # text, or an image
        return (slices[:, 4] > 0).astype(np.int64)
    # Blocks have one colour; otherwise each slice has its own: a document or a chunk is one slice, a prefix another.
    return np.zeros(len(slices), np.int64) if isinstance(mask.pattern, Blocks) else np.arange(len(slices))


def show_square(axes: Any, cells: Any, edges: Integers) -> None:
    """Shows cells [query cells, key cells, 4] with queries from top to bottom and keys from left to right."""
    length = int(edges[-1])
    axes.imshow(cells, extent=(0, length, length, 0), interpolation="nearest", aspect="equal")
    axes.set_xlabel("key position", fontsize=9)
    axes.set_ylabel("query position", fontsize=9)
    style_axes(axes, both_axes=True)
    if length <= 40:
        axes.set_xticks(range(length + 1), minor=True)
        axes.set_yticks(range(length + 1), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)


def style_axes(axes: Any, both_axes: bool = False) -> None:
    """Sets about five tick labels with SI prefixes, such as 128k, on the x axis or both axes, and a light frame."""
    for axis in (axes.xaxis, axes.yaxis) if both_axes else (axes.xaxis,):
        axis.set_major_locator(ticker.MaxNLocator(5, integer=True, steps=[1, 2, 4, 5, 8, 10]))
        axis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.tick_params(which="both", length=0, labelsize=8)
    axes.spines[:].set_color("0.8")


def draw_computed(axes: Any, cells: ComputedCells, title: str) -> None:
    """Draws each visible pair in the colour of the rank that computes it, with step numbers."""
    colors = rank_colors(len(cells.by_rank))
    show_square(axes, blend(cells.by_rank, cell_areas(cells.edges), colors), cells.edges)
    axes.set_title(title, fontsize=10)
    for x, y, step, color, size in cells.labels():
        axes.text(x, y, str(step), color=color, fontsize=size, ha="center", va="center")


def draw_layout(axes: Any, layout: SequenceLayout, edges: Integers) -> None:
    """Draws one row for each rank, coloured where the rank has positions."""
    counts = np.stack([count_positions(spans, edges) for spans in layout.spans_by_shard])
    # [colours, rows, cells]: the row of a rank has that rank's positions, in its colour only.
    rows = np.stack([counts * (np.arange(layout.shards) == rank)[:, None] for rank in range(layout.shards)])
    cells = blend(rows, np.diff(edges)[None, :], rank_colors(layout.shards))
    axes.imshow(cells, extent=(0, layout.length, layout.shards, 0), interpolation="nearest", aspect="auto")
    axes.set_title("positions of each rank", fontsize=10)
    axes.set_xlabel("position", fontsize=9)
    style_axes(axes)
    rank_ticks(axes, layout.shards, at=0.5)


def draw_shares(axes: Any, rank_shares: Shares) -> None:
    """Draws the number of pairs of each rank as a bar, with a dashed line at the mean."""
    ranks, mean = len(rank_shares.by_rank), rank_shares.pairs / len(rank_shares.by_rank)
    axes.barh(range(ranks), rank_shares.by_rank, color=rank_colors(ranks), height=0.8)
    axes.axvline(mean, color="0.3", linewidth=1, linestyle="--")
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_title(f"pairs of each rank: max / mean {rank_shares.imbalance:.3f}", fontsize=10)
    axes.set_xlabel("(query, key) pairs", fontsize=9)
    style_axes(axes)
    axes.spines[["top", "right"]].set_visible(False)
    rank_ticks(axes, ranks, at=0)


def rank_ticks(axes: Any, ranks: int, at: float) -> None:
    """Labels at most eight ranks on the y axis; `at` is the offset of a label from the rank's number."""
    ticks = range(0, ranks, -(-ranks // 8))
    axes.set_yticks([rank + at for rank in ticks], [f"rank {rank}" for rank in ticks])
