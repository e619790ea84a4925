"""Colours for colour-blind readers: for up to eight ranks Okabe-Ito, with grey for black; for more, cividis."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Colors = NDArray[np.float64]
"""[n, 3]: red, green and blue from 0 to 1; or [..., 4]: the same and the opacity."""

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
TOL_LIGHT = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#44BB99", "#BBCC33")
CIVIDIS = ("#00224E", "#7D7C78", "#FEE838")  # the first, middle and last colour of the colormap
MIN_OPACITY = 0.3
"""Opacity of a cell with hardly any visible pair."""


def light_colors() -> Colors:
    """Returns the colours [6, 3] of documents, segments and slices. None of them is the colour of a rank."""
    return np.array(list(map(_rgb, TOL_LIGHT)))


def rank_colors(count: int) -> Colors:
    """Returns the colours [count, 3] of `count` ranks."""
    if count <= len(OKABE_ITO):
        return np.array(list(map(_rgb, OKABE_ITO[:count])))
    # Interpolates between the three colours of cividis, each channel by itself.
    stops, points = np.array(list(map(_rgb, CIVIDIS))), np.linspace(0, 2, count)
    return np.stack([np.interp(points, np.arange(3), stops[:, channel]) for channel in range(3)], axis=1)


def _rgb(text: str) -> tuple[float, ...]:
    """Returns red, green and blue from 0 to 1 of a colour like "#0072B2"."""
    return tuple(int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))


def blend(counts: NDArray[np.int64], areas: Any, colors: Colors) -> Colors:
    """Returns the colour and opacity of cells, [..., 4]: the mean colour of the pairs or positions in each cell.

    The opacity grows from `MIN_OPACITY` to 1 with the part of the cell that is filled; an empty cell is transparent.

    Args:
        counts: [n, ...], the number of pairs or positions of each colour in each cell.
        areas: [...], the largest possible count of a cell.
        colors: [n, 3].
    """
    total = counts.sum(axis=0)
    mean = np.moveaxis(counts, 0, -1) @ colors / np.maximum(total, 1)[..., None]
    opacity = np.where(total > 0, MIN_OPACITY + (1 - MIN_OPACITY) * total / np.maximum(areas, 1), 0)
    return np.concatenate((mean, opacity[..., None]), axis=-1)


def text_color(background: Colors) -> str:
    """Returns "black" or "white", whichever is easier to read on a background colour [3]."""
    # The luma of ITU-R BT.601: weights of red, green and blue in the brightness that an eye sees.
    return "black" if float(background @ np.array([0.299, 0.587, 0.114])) > 0.5 else "white"
