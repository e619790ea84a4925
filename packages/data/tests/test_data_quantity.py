"""Numbers with underscores, exponents and units."""

import argparse

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


@pytest.mark.parametrize(
    "text", ["", "M", "-3", "0", "1.5", "5X", "64q", "64K", "five", "nan", "inf", "1e-3", "1e999", "1e1.5", "0x10", "٣"]
)
def test_invalid_numbers_are_refused_with_accepted_ones(text):
    with pytest.raises(ValueError, match=r"is no whole number .*such as 131072, 1_000_000, 1e6, 64k \(64,000\), 64Ki"):
        quantity(text)
    with pytest.raises(argparse.ArgumentTypeError):
        count_argument()(text)


def test_numbers_below_one_and_beyond_all_positions():
    assert (whole_number("-3"), whole_number("0"), count_argument(0)("0")) == (-3, 0, 0)
    with pytest.raises(ValueError, match=r"'1e99' .*2\^63 - 1"):
        whole_number("1e99")


@pytest.mark.parametrize(("text", "number"), BYTES.items())
def test_bytes_are_parsed(text, number):
    assert byte_quantity(text) == byte_quantity(number) == number


@pytest.mark.parametrize("text", ["64KiB", "5MB", "64B", "1 GB", "1e3B"])
def test_units_of_bytes_are_no_numbers_of_tokens(text):
    for parse in (quantity, whole_number):
        with pytest.raises(ValueError, match=rf"{text}.* no whole number .*64Ki \(65,536\)"):
            parse(text)
    with pytest.raises(argparse.ArgumentTypeError):
        count_argument()(text)


@pytest.mark.parametrize("text", ["64Ki", "5M", "80G", "0GB", "-1GB", "1.5B", "five"])
def test_units_without_bytes_are_no_numbers_of_bytes(text):
    with pytest.raises(ValueError, match=rf"{text}.* no number of bytes.* such as .*80GB.*64KiB"):
        byte_quantity(text)
