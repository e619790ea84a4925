"""Splitting long texts into parts that are tokenized separately, without a change of the tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]]

_BOUNDARY = re.compile(r"\S\r?\n(?=[^\W\d_])|[^\W\d_](?= [^\W\d_])")
"""A match ends where a text may be cut: before a letter that begins a line, unless the previous line ends in a blank or
is empty; or before a single blank between two letters. Byte-level BPE and word-level tokenizers split the text at these
places, so few tokens extend over them."""

_REACH, _TRIES = 1 << 16, 8
"""A cut is searched in the `_REACH` characters after its ideal place; its first `_TRIES` boundaries are tested."""

_WINDOW = 2000
"""Characters on each side of a cut that are encoded to test it."""


def split_text(text: str, size: int, encode: Callable[[str], Tokens]) -> list[str]:
    """Splits `text` into parts of a little more than `size` characters, whose concatenated tokens are those of `text`.

    Each cut is tested: `encode` must return the same tokens for the text around it with and without the cut. If no cut
    near the ideal place passes, the part becomes longer. If the tokenizer's normalizer puts "▁" before each text, as
    LLaMA 2's, no cut passes, and the text is not split.
    """
    cuts, target = [0], size  # target: the ideal place of the next cut
    while target < len(text):
        candidates = islice(_boundaries(text, target, target + _REACH), _TRIES)
        position = next((position for position in candidates if _changes_nothing(text, position, encode)), None)
        if position is not None:
            cuts.append(position)
        target = size + (target if position is None else position)
    return [text[start:stop] for start, stop in pairwise([*cuts, len(text)])]


def _boundaries(text: str, start: int, stop: int) -> Iterator[int]:
    """Yields the places between `start` and `stop` at which the text may be cut."""
    return (match.end() for match in _BOUNDARY.finditer(text, start, min(stop, len(text))))


def _changes_nothing(text: str, position: int, encode: Callable[[str], Tokens]) -> bool:
    """Returns True if the text around a cut has the same tokens with and without it."""
    first = max(position - _WINDOW, 0)
    # The window starts at a boundary too, so that its start is not in the middle of a word.
    start = 0 if first == 0 else next(_boundaries(text, first, position), first)
    before, after = text[start:position], text[position : position + _WINDOW]
    return np.array_equal(encode(before + after), np.concatenate([encode(before), encode(after)]))
