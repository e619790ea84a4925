"""Numbers with units, as people write them: 128Ki, 5M, 1e6; and of bytes 80GB, 5GiB."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from fractions import Fraction

FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
NUMBER = re.compile(r"(-?[0-9][0-9_,]*(?:\.[0-9]+)?)(?:[eE]\+?([0-9]{1,2}))?\s*([kMGT]|[KMGT]i|)(B?)", re.ASCII)
MAX_CHARACTERS = 64

LARGEST = 2**63 - 1
"""The largest accepted number: positions and bytes are 64-bit integers."""

SUCH_AS = "131072, 1_000_000, 1e6, 64k (64,000), 64Ki (65,536)"
"""Accepted whole numbers, for error messages."""
BYTES_SUCH_AS = "1_000_000, 1e6, 80GB (80,000,000,000), 64KiB (65,536)"
"""Accepted numbers of bytes, for error messages."""


def whole_number(text: str | int) -> int:
    """Parses an integer: "5M", "128Ki", "1_000_000", "1e6" or "2.5M".

    k, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024. Units of bytes are refused.

    Raises:
        ValueError: not an integer, beyond 2^63 - 1 in either direction, or more than 64 characters.
    """
    return _parse(text, f"whole number such as {SUCH_AS}", minimum=-LARGEST, in_bytes=False)


def quantity(text: str | int) -> int:
    """Parses an integer of at least 1, as `whole_number`."""
    return _parse(text, f"whole number of at least 1, such as {SUCH_AS}", minimum=1, in_bytes=False)


def byte_quantity(text: str | int) -> int:
    """Parses a number of bytes, at least 1: "80GB", "64KiB", "1_000_000" or "1e6". Units must end in B."""
    return _parse(text, f"number of bytes of at least 1, such as {BYTES_SUCH_AS}", minimum=1, in_bytes=True)


def _parse(text: str | int, kind: str, *, minimum: int, in_bytes: bool) -> int:
    text = str(text).strip()
    match = NUMBER.fullmatch(text)
    if match is None or len(text) > MAX_CHARACTERS:
        shown = repr(text) if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]!r}..."
        raise ValueError(f"{shown} is no {kind}")
    digits, power, unit, byte = match.groups()
    number = Fraction(digits.replace("_", "").replace(",", "")) * 10 ** int(power or 0) * FACTORS[unit]
    if abs(number) > LARGEST:
        raise ValueError(f"{text!r} is beyond 2^63 - 1, the largest position and number of bytes")
    # Of bytes a number without a unit is accepted too, but not a unit without B, which may count tokens.
    right_unit = bool(byte or not unit) if in_bytes else not byte
    if not right_unit or number.denominator != 1 or number < minimum:
        raise ValueError(f"{text!r} is no {kind}")
    return int(number)


def count_argument(minimum: int = 1) -> Callable[[str], int]:
    """Returns a function for `type=` of an `argparse` argument, which parses integers of at least `minimum`."""

    def count(text: str) -> int:
        try:
            number = whole_number(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error
        if number < minimum:
            raise ArgumentTypeError(f"{text} must be at least {minimum}")
        return number

    return count


def short(count: int) -> str:
    """Returns a number of tokens in at most four digits and a unit: 6.144M. Numbers below 1000 have no unit."""
    for unit, factor in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= factor:
            return f"{count / factor:.4g}{unit}"
    return str(count)


def gib(size: float) -> str:
    """Returns bytes in GiB, with two decimals."""
    return f"{size / 2**30:,.2f}"
