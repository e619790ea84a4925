"""Numbers with underscores, exponents and units."""

import pytest

from armillary.data.console import byte_quantity, quantity, whole_number
from armillary.data.console.units import count_argument

NUMBERS = {
    "131072": 131_072,
    "1_000": 1000,
    "131,072": 131_072,
    "1e6": 10**6,
    "2.5E+3": 2500,
    "64k": 64_000,
    "64Ki": 65_536,
    "2.5M": 2_500_000,
    "1Mi": 2**20,
    "1.5Gi": 3 << 29,
}
BYTES = {"1_000": 1000, "1e6": 10**6, "512B": 512, "2TB": 2 * 10**12, "3 GiB": 3 << 30, "1.5kB": 1500}


@pytest.mark.parametrize(("text", "number"), NUMBERS.items())
def test_numbers_are_parsed(text, number):
    assert quantity(text) == quantity(number) == count_argument()(text) == number


def test_whole_numbers_may_be_below_one():
    assert (whole_number("-3"), whole_number("0"), count_argument(0)("0")) == (-3, 0, 0)


@pytest.mark.parametrize(("text", "number"), BYTES.items())
def test_bytes_are_parsed(text, number):
    assert byte_quantity(text) == byte_quantity(number) == number
