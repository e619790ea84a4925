"""Draws the pictures of docs/masks.md from its listings: `uv run python docs/tools/draw_masks_page.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mask_picture import draw_mask

from armillary.core import SequenceLayout

DOCS = Path(__file__).parents[1]
TOKENS = 32
ON_RANKS = "_on_four_ranks"
"""Suffix of pictures with a sequence layout."""


def main(folder: Path = DOCS / "pictures") -> None:
    page = (DOCS / "masks.md").read_text()
    named = dict[str, Any]()
    exec("".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)), named)
    for name in re.findall(r"\]\(pictures/(\w+)\.png\)", page):
        layout = SequenceLayout.zigzag(TOKENS, 4) if name.endswith(ON_RANKS) else None
        draw_mask(named[name.removesuffix(ON_RANKS)], TOKENS, folder / f"{name}.png", layout)


if __name__ == "__main__":
    main()
