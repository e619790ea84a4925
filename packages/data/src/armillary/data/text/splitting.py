"""Splitting long texts into parts that are tokenized separately, with the tokens of the whole text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]]

_BOUNDARY = re.compile(r"\S\r?\n(?=[^\W\d_])|[^\W\d_](?= [^\W\d_])")
"""Ends before a letter at the start of a line, unless the previous line ends in blanks, and before the single blank
between two words: byte-level BPE and word-level tokenizers split there, so tokens rarely cross."""

_REACH, _TRIES = 1 << 16, 8
"""A cut is searched within this many characters after its ideal place, and tried at this many boundaries."""

_WINDOW = 2000
"""Characters on each side of a cut that are encoded to test it."""


def split_text(text: str, size: int, encode: Callable[[str], Tokens]) -> list[str]:
    """Splits `text` into parts of a little more than `size` characters whose tokens, joined, equal the text's.

    Each cut is tested with `encode` on the text around it. Where no cut passes, the part is longer; a tokenizer that
    puts a mark in front of each text gets the whole text.
    """
    cuts, target = [0], size
    while target < len(text):
        candidates = islice(_boundaries(text, target, target + _REACH), _TRIES)
        position = next((position for position in candidates if _changes_nothing(text, position, encode)), None)
        cuts += [] if position is None else [position]
        target = size + (target if position is None else position)
    return [text[start:stop] for start, stop in pairwise([*cuts, len(text)])]


def _boundaries(text: str, start: int, stop: int) -> Iterator[int]:
    return (match.end() for match in _BOUNDARY.finditer(text, start, min(stop, len(text))))


def _changes_nothing(text: str, position: int, encode: Callable[[str], Tokens]) -> bool:
    """Returns True if the text around a cut has the same tokens with and without it."""
    first = max(position - _WINDOW, 0)
    # The window starts at a boundary too, so that its start is not in the middle of a word.
    start = 0 if first == 0 else next(_boundaries(text, first, position), first)
    before, after = text[start:position], text[position : position + _WINDOW]
    return np.array_equal(encode(before + after), np.concatenate([encode(before), encode(after)]))
