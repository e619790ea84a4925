"""Numbers as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


LARGEST = 2**63 - 1
"""What a position, or a number of bytes, is counted in."""


def quantity(text: str) -> int:
    """A whole number such as "5M", "128Ki", "1_000_000", "2.5M" or, of bytes, "2TB": k, M, G, T or Ki, Mi, Gi, Ti.

    Raises:
        ValueError: something else, less than 1, or more than 2^63 - 1.
    """
    number = whole(text)
    if number < 1:
        raise ValueError(f"{text!r} is no whole number such as 1000000, 5M or 128Ki")
    return number


def whole(text: str) -> int:
    """As `quantity`, but 0 and numbers below it too.

    Raises:
        ValueError: something else, or more than 2^63 - 1.
    """
    found = re.fullmatch(r"(-?[0-9][0-9_,]*(?:\.[0-9]+)?)\s*([kMGT]|[KMGT]i|)B?", text.strip(), re.ASCII)
    if found is None or len(found[1]) > DIGITS:
        raise ValueError(f"{clipped(text)} is no whole number such as 1000000, 5M or 128Ki")
    number = Fraction(found[1].replace("_", "").replace(",", "")) * FACTORS[found[2]]
    if number.denominator != 1:
        raise ValueError(f"{text!r} is no whole number such as 1000000, 5M or 128Ki")
    if abs(number) > LARGEST:
        raise ValueError(f"{text!r} is more than 2^63 - 1, which positions and bytes are counted up to")
    return int(number)


DIGITS = 64


def clipped(text: str) -> str:
    """Text in quotes, and of a long one the beginning."""
    return repr(text) if len(text) <= DIGITS else f"{text[:DIGITS]!r}..."


def short(count: int) -> str:
    """A number of tokens, to four digits: 6.144M."""
    for unit, factor in (("M", 10**6), ("k", 10**3)):
        if count >= factor:
            return f"{count / factor:.4g}{unit}"
    return str(count)


def binary(size: int) -> str:
    """Bytes in the unit that leaves at least 1 of it, to three decimals: 1.625 GiB."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:,.3f} {unit}"
    return f"{size} B"


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:,.2f}"
