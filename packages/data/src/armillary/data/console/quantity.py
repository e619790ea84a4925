"""Numbers as people write them."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from fractions import Fraction

FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


LARGEST = 2**63 - 1
"""What a position, or a number of bytes, is counted in."""


SUCH_AS = "131072, 1_000_000, 1e6, 64k (64,000), 64Ki (65,536), or of bytes 80GB"
"""What is taken, for whoever gave something else."""


def quantity(given: str | int) -> int:
    """A whole number of at least 1: "5M", "128Ki", "1_000_000", "1e6", "2.5M" or, of bytes, "2TB".

    k, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024.

    Raises:
        ValueError: something else, less than 1, or more than 2^63 - 1.
    """
    number = whole(given)
    if number < 1:
        raise ValueError(f"{given!r} is no whole number of at least 1, such as {SUCH_AS}")
    return number


def whole(given: str | int) -> int:
    """As `quantity`, but 0 and numbers below it too.

    Raises:
        ValueError: something else, or more than 2^63 - 1.
    """
    text = given.strip() if isinstance(given, str) else str(given)
    found = WHOLE.fullmatch(text)
    if found is None or len(text) > DIGITS:
        raise ValueError(f"{clipped(text)} is no whole number such as {SUCH_AS}")
    digits, power, unit = found[1].replace("_", "").replace(",", ""), int(found[2] or 0), found[3]
    number = Fraction(digits) * 10**power * FACTORS[unit]
    if number.denominator != 1:
        raise ValueError(f"{text!r} is no whole number such as {SUCH_AS}")
    if abs(number) > LARGEST:
        raise ValueError(f"{text!r} is more than 2^63 - 1, which positions and bytes are counted up to")
    return int(number)


WHOLE = re.compile(r"(-?[0-9][0-9_,]*(?:\.[0-9]+)?)(?:[eE]\+?([0-9]{1,2}))?\s*([kMGT]|[KMGT]i|)B?", re.ASCII)
DIGITS = 64


def count_argument(least: int = 1) -> Callable[[str], int]:
    """`whole` as the `type` of an argument of `argparse`, for numbers no less than `least`."""

    def count(text: str) -> int:
        try:
            found = whole(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error
        if found < least:
            raise ArgumentTypeError(f"{text} must be at least {least}")
        return found

    return count


def clipped(text: str) -> str:
    """Text in quotes, and of a long one the beginning."""
    return repr(text) if len(text) <= DIGITS else f"{text[:DIGITS]!r}..."


def short(count: int) -> str:
    """A number of tokens, to four digits: 6.144M."""
    for unit, factor in (("M", 10**6), ("k", 10**3)):
        if count >= factor:
            return f"{count / factor:.4g}{unit}"
    return str(count)


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:,.2f}"
