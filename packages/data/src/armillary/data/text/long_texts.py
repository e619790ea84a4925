"""Long texts in parts, where encoding the parts gives the same tokens as encoding the whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]]

_PLACES = re.compile(r"\S\r?\n(?=[^\W\d_])|[^\W\d_](?= [^\W\d_])")
"""Ends before a letter at the start of a line, if the line before doesn't end in blanks, and before the single blank
between two words: the patterns that byte-level BPE splits text by split it there, and so do those that go by words."""

_REACH, _TRIES = 1 << 16, 8
"""A cut is looked for in so many characters after the place where it is wanted, and at so many places in them."""

_WINDOW = 2000
"""Characters on each side of a cut that are encoded to see that the cut changes nothing."""


def parts(text: str, size: int, encode: Callable[[str], Tokens]) -> list[str]:
    """`text` cut into parts of a bit more than `size` characters, whose tokens joined are those of the whole text.

    Each cut is tried on the text around it, with `encode`. Where none holds, the part is longer: a tokenizer that puts
    a mark in front of each text, whatever it begins with, gets the text whole.
    """
    cuts, wanted = [0], size
    while wanted < len(text):
        tried = islice(_places(text, wanted, wanted + _REACH), _TRIES)
        cut = next((cut for cut in tried if _changes_nothing(text, cut, encode)), None)
        cuts += [] if cut is None else [cut]
        wanted = size + (wanted if cut is None else cut)
    return [text[start:stop] for start, stop in pairwise([*cuts, len(text)])]


def _places(text: str, start: int, stop: int) -> Iterator[int]:
    return (found.end() for found in _PLACES.finditer(text, start, min(stop, len(text))))


def _changes_nothing(text: str, cut: int, encode: Callable[[str], Tokens]) -> bool:
    first = max(cut - _WINDOW, 0)
    # The window itself starts where a cut may be, so that its own start is not in the middle of a word.
    start = 0 if first == 0 else next(_places(text, first, cut), first)
    left, right = text[start:cut], text[cut : cut + _WINDOW]
    return np.array_equal(encode(left + right), np.concatenate([encode(left), encode(right)]))
