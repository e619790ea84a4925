"""Colours that remain apart to colour-blind readers: Okabe and Ito's for a few ranks, a ramp of cividis for many."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Colors = NDArray[np.float64]
"""[n, 3] red, green and blue from 0 to 1, or [..., 4] with opacity."""

FEW = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
LIGHT = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#44BB99", "#BBCC33")
"""Tol's light colours, for what a mask is made of: no rank's."""
FAINTEST = 0.3
"""Opacity of a cell of which hardly a pair is visible."""


def light_colors() -> Colors:
    """Of documents, segments and slices; after the last the first comes again."""
    return np.array([_rgb(text) for text in LIGHT])


def colors_of(count: int) -> Colors:
    """As many colours as there are ranks."""
    if count <= len(FEW):
        return np.array([_rgb(text) for text in FEW[:count]])
    ends = np.array([_rgb("#00224E"), _rgb("#7D7C78"), _rgb("#FEE838")])  # first, middle and last of cividis
    at = np.linspace(0, 2, count)
    return np.stack([np.interp(at, np.arange(3), ends[:, channel]) for channel in range(3)], axis=1)


def _rgb(text: str) -> tuple[float, ...]:
    return tuple(int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))


def blended(counts: NDArray[np.int64], most: Any, colors: Colors) -> Colors:
    """Cells in the mean colour of what is in them, the fainter the less that is; without any, transparent.

    Args:
        counts: [n, ...] of each colour.
        most: [...] what a cell can have in all.
    """
    total = counts.sum(axis=0)
    mean = np.moveaxis(counts, 0, -1) @ colors / np.maximum(total, 1)[..., None]
    opacity = np.where(total > 0, FAINTEST + (1 - FAINTEST) * total / np.maximum(most, 1), 0)
    return np.concatenate((mean, opacity[..., None]), axis=-1)


def text_on(color: Colors) -> str:
    """Black or white, whichever is read more easily on a colour."""
    return "black" if float(color @ np.array([0.299, 0.587, 0.114])) > 0.5 else "white"
