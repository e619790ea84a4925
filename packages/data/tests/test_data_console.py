"""The kit of commands: numbers with units, tables that truncate nothing, and a progress bar on stderr."""

import io
import sys

import pytest

from armillary.data.console import Bar, Column, byte_quantity, print_table, quantity, whole_number
from armillary.data.console.output import table
from armillary.data.console.units import count_argument

# -- numbers ----------------------------------------------------------------------------------------------------------

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


# -- tables -----------------------------------------------------------------------------------------------------------

COLUMNS = [Column("attention", text=True), Column("host memory (GiB)"), Column("why", text=True, own_line=True)]
ROWS = [["ulysses+token_ring, 16 heads", "5.74", "slower: exchange"], [], ["ring", "1,234.50", ""]]


def test_a_table_is_as_wide_as_it_needs_to_be():
    assert table(COLUMNS, ROWS) == (
        "attention                     host memory (GiB)  why\n"
        "----------------------------  -----------------  ----------------\n"
        "ulysses+token_ring, 16 heads               5.74  slower: exchange\n"
        "----------------------------  -----------------  ----------------\n"
        "ring                                   1,234.50"
    )


def test_on_a_narrow_terminal_it_breaks_between_words():
    assert table(COLUMNS, ROWS, 29) == (
        "                         host\n"
        "                       memory\n"
        "attention               (GiB)\n"
        "-------------------  --------\n"
        "ulysses+token_ring,      5.74\n"
        "16 heads\n"
        "    why: slower: exchange\n"
        "-------------------  --------\n"
        "ring                 1,234.50"
    )


@pytest.mark.parametrize("width", [1, 20, 40, 60, 200, None])
def test_words_and_numbers_are_complete_at_any_width(width):
    text = table(COLUMNS, ROWS, width)
    words = text.replace("why:", "why").split()
    assert {"ulysses+token_ring,", "1,234.50", "exchange", "attention", "(GiB)"} <= set(words)
    assert width is None or width < 40 or max(map(len, text.splitlines())) <= width
    assert ("\n    why:" in text) == (width is not None and width < 66)  # the width without a limit


def test_the_width_is_the_terminals(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "32")
    print_table(COLUMNS, ROWS)
    assert capsys.readouterr().out == table(COLUMNS, ROWS) + "\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table(COLUMNS, ROWS)
    assert capsys.readouterr().out == table(COLUMNS, ROWS, 32) + "\n"


# -- progress ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(**options: bool) -> None:
    with Bar("counting", **options) as bar:
        for step in range(1, 21):
            bar.show("counting sheep", step, 20)
            bar.refresh()
        print("[not markup]")


@pytest.mark.parametrize("options", [{}, {"quiet": True}, {"quiet": True, "lines": True}])
def test_without_a_terminal_nothing_is_shown(options, capsys):
    work(**options)
    assert capsys.readouterr() == ("[not markup]\n", "")


def test_log_gets_few_lines(capsys):
    work(lines=True)
    messages = capsys.readouterr().err.splitlines()
    assert len(messages) == 10 and messages[-1] == "counting sheep: 100% of 20 bytes"


def test_a_terminal_gets_a_bar_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    work()
    assert "counting sheep" in sys.stderr.getvalue() and "20/20" in sys.stderr.getvalue()
    assert capsys.readouterr().out == "[not markup]\n"
    monkeypatch.setattr(sys, "stderr", Terminal())
    work(quiet=True)
    assert sys.stderr.getvalue() == ""
