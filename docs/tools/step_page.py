"""Writes an HTML page to step through a method, or an SVG file with frames of one or several methods side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from step_drawing import SIDE, Drawing, moves_text, rank_styles
from step_frames import Frame

GAP = 16
"""Distance between drawings of an SVG file, in SVG units."""
CAPTION = 18
"""Height of the caption above a frame of an SVG file, in SVG units."""
CHARACTER_WIDTH = 6.5
"""Mean width of a character of a caption, in SVG units."""


@dataclass(frozen=True)
class MethodSteps:
    """The frames of one method and their drawings.

    Args:
        title: such as "wallfacer C=2 on 8 ranks".
        subtitle: the mask, the layout and the sizes of the call.
        facts: properties of the call, for JSON.
    """

    title: str
    subtitle: str
    facts: dict[str, Any]
    frames: Sequence[Frame]
    drawing: Drawing

    @property
    def as_dict(self) -> dict[str, Any]:
        """The title, the facts and all frames, as JSON values."""
        return {"title": self.title, **self.facts, "frames": [frame.as_dict for frame in self.frames]}


def html_page(steps: MethodSteps) -> str:
    """Returns an HTML page that contains its styles, script and data, so it loads no other file."""
    frames = "\n".join(
        f'<figure class="frame">{svg(steps.drawing.ring(frame), "ranks")}{svg(steps.drawing.masks(i), "mask")}'
        f"<figcaption>{escape(frame.title)}: {escape(moves_text(frame))}</figcaption></figure>"
        for i, frame in enumerate(steps.frames)
    )
    return Template(resource("page.html")).substitute(
        title=escape(steps.title),
        subtitle=escape(steps.subtitle),
        style=resource("drawing.css") + resource("page.css") + rank_styles(steps.drawing.ranks) + "\n",
        definitions=steps.drawing.definitions(),
        frames=frames,
        data=script_json(steps.as_dict),
        script=resource("page.js"),
    )


def svg(content: str, label: str) -> str:
    """Returns one drawing as an `svg` element of a page."""
    return f'<svg viewBox="0 0 {SIDE} {SIDE}" role="img" aria-label="{label}">{content}</svg>'


def script_json(value: object) -> str:
    """Returns JSON for a script element. Escapes characters that could end the element or a line of JavaScript."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def svg_file(steps: MethodSteps, columns: int = 2) -> str:
    """Returns an SVG file with all frames of a method, `columns` side by side."""
    frames = range(len(steps.frames))
    cells = [(i % columns, i // columns, i) for i in frames]
    return sheet([(steps, 0, cells)], columns, "all-steps")


def comparison(methods: Sequence[MethodSteps], rows: int) -> str:
    """Returns an SVG file with a column for each method, of at most `rows` frames of its forward."""
    drawings = [
        (steps, column, [(0, row, i) for row, i in enumerate(spaced_frames(steps.frames, rows))])
        for column, steps in enumerate(methods)
    ]
    return sheet(drawings, len(methods), "comparison")


def spaced_frames(frames: Sequence[Frame], rows: int) -> list[int]:
    """Returns indices of at most `rows` frames of forward that have sends: the first, the last, and some between."""
    sending_frames = [
        i for i, frame in enumerate(frames) if frame.phase == "forward" and (frame.moves or frame.returning)
    ]
    sending_frames = sending_frames or [0]
    count = min(rows, len(sending_frames))
    return [sending_frames[round(i * (len(sending_frames) - 1) / max(count - 1, 1))] for i in range(count)]


def sheet(
    drawings: Sequence[tuple[MethodSteps, int, Sequence[tuple[int, int, int]]]], columns: int, style_class: str
) -> str:
    """Returns an SVG file with frames of methods in rows and columns.

    Args:
        drawings: for each method (steps, first column, frames). A frame is (column after the first, row, index).
        columns: number of columns of the file.
        style_class: "all-steps" or "comparison", the CSS class of the file.
    """
    width_of_frame = 2 * SIDE + GAP
    height_of_frame = SIDE + CAPTION + GAP
    rows = max(row for _, _, cells in drawings for _, row, _ in cells) + 1
    width, height = columns * (width_of_frame + 2 * GAP), rows * height_of_frame + 3 * GAP
    body = list[str]()
    for steps, first, cells in drawings:
        left = first * (width_of_frame + 2 * GAP) + GAP
        body.append(f'<text x="{left}" y="{1.5 * GAP}" class="heading">{escape(steps.title)}</text>')
        body.append(steps.drawing.definitions())
        for column, row, i in cells:
            x, y = left + column * (width_of_frame + 2 * GAP), row * height_of_frame + 2.5 * GAP
            frame = steps.frames[i]
            # Captions of a comparison have larger letters (`drawing.css`).
            character_width = CHARACTER_WIDTH * (1.3 if style_class == "comparison" else 1)
            caption = truncate(f"{frame.title} · {moves_text(frame)}", int(width_of_frame / character_width))
            body.append(
                f'<g transform="translate({x} {y})"><text y="11" class="caption">{escape(caption)}</text>'
                f'<g transform="translate(0 {CAPTION})">{steps.drawing.ring(frame)}'
                f'<g transform="translate({SIDE + GAP} 0)">{steps.drawing.masks(i)}</g></g></g>'
            )
    style = resource("drawing.css") + rank_styles(max(steps.drawing.ranks for steps, _, _ in drawings))
    title = escape(", ".join(steps.title for steps, _, _ in drawings))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" class="{style_class}" '
        f'role="img" aria-label="{title}">\n'
        f"<style>{style}</style>\n"
        f'<rect width="{width}" height="{height}" class="page"/>\n{"".join(body)}\n</svg>\n'
    )


def truncate(text: str, length: int) -> str:
    """Returns the text, or if it is too long its first `length` - 1 characters and an ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def resource(name: str) -> str:
    """Returns the text of a file in `templates`."""
    return (Path(__file__).parent / "templates" / name).read_text("utf-8")
