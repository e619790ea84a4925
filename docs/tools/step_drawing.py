"""Draws a frame as two SVG drawings: the ranks in a circle with their sends, and the mask with the computed blocks.

Shapes that several frames use are defined once: an arrow for each (sender, receiver), and a path for each block. Shapes
have CSS classes instead of colours, so that the style sheet can have colours for light and for dark pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise, product
from math import ceil, cos, hypot, pi, sin

import numpy as np
import torch
from numpy.typing import NDArray
from palette import rank_colors, text_color
from step_frames import Frame, RankBlock

from armillary.attention import AttentionMask
from armillary.attention.mask.slices_trees_blocks import rectangles
from armillary.attention.plans import Move
from armillary.core import SequenceLayout

SIDE = 200
"""Side of each of the two drawings, in SVG units."""
STRIP = 6
"""Width of the strips beside the mask, which show the rank of each position, in SVG units."""
KEY_TENSORS = {"k", "v", "dk", "dv"}
DOT_SHARE = 0.36
"""Radius of a rank's dot, as a fraction of the distance between neighbouring dots."""
MOST_CELLS = 64
"""Maximum number of cells to a side of the square, up to 32 shards. More shards have two cells each."""

Cells2D = NDArray[np.bool_]
"""A boolean for each cell: [query cells, key cells]."""


@dataclass(frozen=True)
class MaskCells:
    """A mask at one position of the sequence for each row and column of cells. Short sequences show all positions.

    Args:
        positions: [cells], the positions.
        shards: [cells], the shard of the sequence axis that has each position.
        owners: [cells], the rank that has each position outside of attention.
        visible: [cells, cells], True where the query (row) sees the key (column).
    """

    positions: NDArray[np.int64]
    shards: NDArray[np.int64]
    owners: NDArray[np.int64]
    visible: Cells2D

    @classmethod
    def of(cls, layout: SequenceLayout, mask: AttentionMask, ulysses: int = 1) -> MaskCells:
        """Divides the sequence into cells and chooses a position of each.

        Args:
            layout: layout over the sequence axis.
            ulysses: number of ranks on the head axis, which divide each shard among them outside of attention.
        """
        # The number of cells is a multiple of a zigzag layout's number of chunks, so cells end where chunks end.
        chunks = 2 * layout.shards
        count = min(layout.length, chunks * max(1, MOST_CELLS // chunks))
        edges = np.arange(count + 1) * layout.length // count
        # A cell shows one of the positions from its middle on, whose shard has been chosen least often so far. In a
        # striped layout the middles of all cells may be of one shard.
        uses, chosen_positions, chosen_shards = np.zeros(layout.shards, np.int64), list[int](), list[int]()
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            middle = (start + stop) // 2
            candidates = np.arange(middle, min(stop, middle + layout.shards))
            shards = layout.shards_at(candidates)
            best = int(uses[shards].argmin())
            uses[shards[best]] += 1
            chosen_positions.append(int(candidates[best]))
            chosen_shards.append(int(shards[best]))
        positions, tensor = np.array(chosen_positions), torch.tensor(chosen_positions)
        owners = layout.refine(ulysses).shards_at(positions)
        return cls(positions, np.array(chosen_shards), owners, mask.visible(tensor, tensor).numpy())

    def block(self, queries: Sequence[int], keys: Sequence[int]) -> Cells2D:
        """Returns the visible cells whose query is of one of the shards `queries`, and whose key of one of `keys`."""
        return self.visible & np.isin(self.shards, queries)[:, None] & np.isin(self.shards, keys)[None, :]


def outline(cells: Cells2D) -> str:
    """Returns an SVG path of rectangles that cover the True cells. The side of a cell is one unit."""
    return "".join(f"M{c0} {r0}h{c1 - c0}v{r1 - r0}h{c0 - c1}z" for r0, r1, c0, c1 in rectangles(cells))


@dataclass(frozen=True)
class Circle:
    """Ranks in a circle, clockwise from the top."""

    ranks: int

    @property
    def dot(self) -> float:
        """Radius of a rank's dot."""
        return min(15.0, self.radius * 2 * pi / max(self.ranks, 2) * DOT_SHARE)

    @property
    def radius(self) -> float:
        """Radius of the circle of dots."""
        return SIDE / 2 - 40  # the labels of the ranks are outside of the circle

    def center(self, rank: int, radius: float | None = None) -> tuple[float, float]:
        """Returns the center of a rank's dot, or the point in its direction at another radius."""
        angle = 2 * pi * rank / self.ranks - pi / 2
        radius = self.radius if radius is None else radius
        return SIDE / 2 + radius * cos(angle), SIDE / 2 + radius * sin(angle)

    def arrow(self, source: int, target: int) -> str:
        """Returns the SVG path of an arrow between ranks. The two directions of a pair bend to opposite sides."""
        # A quadratic Bezier curve from dot to dot, whose control point is beside the middle of the straight line.
        (x0, y0), (x1, y1) = self.center(source), self.center(target)
        length = hypot(x1 - x0, y1 - y0)
        side_x, side_y = (y0 - y1) / length, (x1 - x0) / length  # unit vector across the line
        bend = 0.14 * length + 3
        control_x, control_y = (x0 + x1) / 2 + bend * side_x, (y0 + y1) / 2 + bend * side_y
        start = _towards(x0, y0, control_x, control_y, self.dot + 1)
        end = _towards(x1, y1, control_x, control_y, self.dot + 2)
        # The arrow's head: two strokes from the tip, which are the direction back to the control point turned by 35
        # degrees to either side (cosine 0.82, sine 0.57).
        back_x, back_y = control_x - end[0], control_y - end[1]
        size = min(6.0, 0.5 * self.dot + 1.5) / hypot(back_x, back_y)
        stroke_ends = (
            (
                end[0] + size * (back_x * 0.82 - side * back_y * 0.57),
                end[1] + size * (back_y * 0.82 + side * back_x * 0.57),
            )
            for side in (1, -1)
        )
        first, second = (f"{x:.1f} {y:.1f}" for x, y in stroke_ends)
        tip = f"{end[0]:.1f} {end[1]:.1f}"
        return f"M{start[0]:.1f} {start[1]:.1f}Q{control_x:.1f} {control_y:.1f} {tip}M{first}L{tip}L{second}"


def _towards(x: float, y: float, to_x: float, to_y: float, distance: float) -> tuple[float, float]:
    """Returns the point at `distance` from (x, y), in the direction of (to_x, to_y)."""
    length = hypot(to_x - x, to_y - y)
    return x + (to_x - x) * distance / length, y + (to_y - y) * distance / length


class Drawing:
    """Draws the frames of one method.

    Args:
        ranks: number of all ranks.
        ulysses: number of ranks on the head axis. Each has a square of its own, with the mask for its heads.
        name: prefix of ids, to make them unique in a file with several methods.
    """

    def __init__(self, frames: Sequence[Frame], cells: MaskCells, ranks: int, ulysses: int, name: str = "") -> None:
        self.frames, self.cells, self.ranks, self.ulysses, self.name = frames, cells, ranks, ulysses, name
        self.circle = Circle(ranks)

    def definitions(self) -> str:
        """Returns the SVG element that defines the shapes to which `ring` and `masks` refer."""
        blocks = {(block.queries, block.keys) for frame in self.frames for block in frame.blocks}
        pairs = {pair for frame in self.frames for pair, _ in arrows(frame)}
        shapes = [
            (self._id("mask"), outline(self.cells.visible)),
            *((self._block_id(*block), outline(self.cells.block(*block))) for block in sorted(blocks)),
            *((self._id("a", *pair), self.circle.arrow(*pair)) for pair in sorted(pairs)),
        ]
        paths = (f'<path id="{name}" d="{path}"/>' for name, path in shapes)
        squares = product(range(len(self.frames)), range(self.ulysses))
        computed_cells = (self._computed_blocks(*square) for square in squares if self._blocks(*square))
        return f"<defs>{''.join(paths)}{self._strips()}{''.join(computed_cells)}</defs>"

    def ring(self, frame: Frame) -> str:
        """Returns the drawing of the ranks in a circle, their sends, and the shards with which each rank computes."""
        sends = (f'<use href="#{self._id("a", *pair)}" class="{style}"/>' for pair, style in arrows(frame))
        blocks = [[block for block in frame.blocks if block.rank == rank] for rank in range(self.ranks)]
        dots = (self._dot(rank, blocks[rank]) for rank in range(self.ranks))
        return f"<g>{''.join(sends)}{''.join(dots)}</g>"

    def masks(self, index: int) -> str:
        """Returns the drawing of the mask, with the blocks that are computed in frame `index` and before it."""
        # One square for each rank of the head axis, in a grid that is as square as possible.
        columns = ceil(self.ulysses**0.5)
        rows = ceil(self.ulysses / columns)
        # Above each square: its heads, and a strip with the owner of each key. To its left, the owners of queries.
        strip = STRIP / columns
        head = strip + (11 if self.ulysses > 1 else 0)
        side = min(SIDE / columns - 2 * strip, SIDE / rows - head - strip)
        squares = list[str]()
        for square in range(self.ulysses):
            row, column = divmod(square, columns)
            x, y = column * SIDE / columns + strip, row * (side + head + strip) + head
            if self.ulysses > 1:
                label = heads_text(self._blocks(index, square))
                squares.append(f'<text x="{x:.1f}" y="{y - strip - 2:.1f}" class="small">{escape(label)}</text>')
            scale = side / len(self.cells.visible)
            squares.append(
                f'<g transform="translate({x:.1f} {y:.1f}) scale({scale:.4f})">{self._square(index, square)}</g>'
            )
        return "".join(squares)

    def _strips(self) -> str:
        """Returns the strips to the left of and above a square, in the colours of the ranks that have the positions."""
        owners, width = self.cells.owners, STRIP * len(self.cells.owners) / SIDE
        starts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
        runs = [(int(owners[start]), start, stop - start) for start, stop in pairwise(starts)]
        left_strip = (
            f'<rect x="{-width:.2f}" y="{y}" width="{width:.2f}" height="{n}" class="r{r}"/>' for r, y, n in runs
        )
        top_strip = (
            f'<rect x="{x}" y="{-width:.2f}" width="{n}" height="{width:.2f}" class="r{r}"/>' for r, x, n in runs
        )
        return f'<g id="{self._id("strips")}">{"".join(left_strip)}{"".join(top_strip)}</g>'

    def _square(self, index: int, square: int) -> str:
        """Returns the mask of one rank of the head axis: blocks of frame `index`, and paler those of earlier frames."""
        size = len(self.cells.visible)
        phase = self.frames[index].phase
        history = [i for i in range(index + 1) if self.frames[i].phase == phase and self._blocks(i, square)]
        # Each stage of heads computes all pairs for its heads, so it starts with an empty square.
        heads = self._blocks(history[-1], square)[0].heads if history else ()
        stage = [i for i in history if self._blocks(i, square)[0].heads == heads]
        earlier = "".join(f'<use href="#{self._id("f", i, square)}"/>' for i in stage if i < index)
        current = f'<use href="#{self._id("f", index, square)}"/>' if index in stage else ""
        return (
            f'<rect width="{size}" height="{size}" class="paper"/><use href="#{self._id("mask")}" class="seen"/>'
            f'<use href="#{self._id("strips")}"/><g class="done">{earlier}</g>{current}'
        )

    def _blocks(self, index: int, square: int) -> list[RankBlock]:
        """Returns the blocks of a frame in the square of a rank of the head axis."""
        return [block for block in self.frames[index].blocks if block.rank % self.ulysses == square]

    def _computed_blocks(self, index: int, square: int) -> str:
        """Returns the shape of all blocks of a frame in one square."""
        blocks = (
            f'<use href="#{self._block_id(block.queries, block.keys)}" class="r{block.rank}"/>'
            for block in self._blocks(index, square)
        )
        return f'<g id="{self._id("f", index, square)}">{"".join(blocks)}</g>'

    def _dot(self, rank: int, blocks: Sequence[RankBlock]) -> str:
        """Returns the dot of a rank and, if it computes one block, a label with the block's shards."""
        (x, y), dot = self.circle.center(rank), self.circle.dot
        text = (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{dot:.1f}" class="r{rank} dot"/>'
            f'<text x="{x:.1f}" y="{y:.1f}" dy=".36em" font-size="{dot:.1f}" class="t{rank} rank">{rank}</text>'
        )
        if len(blocks) != 1 or self.ranks > 16:
            return text
        x, y = self.circle.center(rank, self.circle.radius + dot + 4)
        # The label is outside of the circle: left or right of the dot, or centered above or below it. It has two lines,
        # so above and below the dot it is moved further from the center.
        across = (x - SIDE / 2) / SIDE
        anchor = "middle" if abs(across) < 0.1 else "start" if across > 0 else "end"
        y += (y - SIDE / 2) * 0.05
        labels = (f"q {span_text(blocks[0].queries)}", f"k {span_text(blocks[0].keys)}")
        lines = "".join(
            f'<tspan x="{x:.1f}" dy="{dy}">{label}</tspan>' for dy, label in zip((0, 8.5), labels, strict=True)
        )
        return f'{text}<text y="{y - 1.5:.1f}" class="label" text-anchor="{anchor}">{lines}</text>'

    def _block_id(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> str:
        return self._id("b", span_text(queries), span_text(keys))

    def _id(self, *names: object) -> str:
        return "_".join(map(str, (self.name, *names))).strip("_").replace(" ", "")


def arrows(frame: Frame) -> Iterator[tuple[tuple[int, int], str]]:
    """Yields ((source, target), CSS classes) of each arrow of a frame.

    All moves from one rank to another share one arrow; results of the previous step have another arrow.
    """
    styles = dict[tuple[tuple[int, int], bool], set[str]]()
    for moves, late in ((frame.moves, False), (frame.returning, True)):
        for move in moves:
            for send in move.sends:
                styles.setdefault(((send.source, send.target), late), set()).add(side_of(move))
    for (pair, late), sides in styles.items():
        side = sides.pop() if len(sides) == 1 else "both"
        yield pair, f"arrow {side}{' late' if late else ''}"


def side_of(move: Move) -> str:
    """Returns "keys" if a move sends keys, values or their gradients, else "queries"."""
    return "keys" if set(move.tensors) <= KEY_TENSORS else "queries"


def moves_text(frame: Frame) -> str:
    """Returns the tensors and kinds of a frame's moves, such as "k, v: p2p"."""
    texts = dict[str, list[str]]()
    for move in (*frame.moves, *frame.returning):
        texts.setdefault(move.kind.replace("_", "-"), []).extend(move.tensors)
    return "; ".join(f"{', '.join(dict.fromkeys(tensors))}: {kind}" for kind, tensors in texts.items()) or "no sends"


def span_text(numbers: Sequence[int]) -> str:
    """Returns numbers as ranges, such as "0-3, 6"."""
    texts, start = list[str](), 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            first, last = numbers[start], numbers[i - 1]
            texts.append(f"{first}" if first == last else f"{first}-{last}")
            start = i
    return ", ".join(texts)


def heads_text(blocks: Sequence[RankBlock]) -> str:
    """Returns the query heads of blocks, such as "heads 0-3"."""
    heads = sorted({head for block in blocks for head in block.heads})
    return f"head{'s' if len(heads) > 1 else ''} {span_text(heads)}" if heads else ""


def rank_styles(ranks: int) -> str:
    """Returns CSS rules with the colour of each rank's dot and blocks, and of the text on the dot."""
    rules = list[str]()
    for rank, color in enumerate(rank_colors(ranks)):
        # Lighter than the palette, whose darkest colours would be invisible on a dark page.
        lighter = 0.85 * color + 0.15
        red, green, blue = (round(255 * channel) for channel in lighter)
        rules.append(f".r{rank}{{fill:#{red:02x}{green:02x}{blue:02x}}}.t{rank}{{fill:{text_color(lighter)}}}")
    return "".join(rules)
