"""Tables of plain text, which never truncate a cell."""

import pytest

from armillary.data.console import Column, print_table
from armillary.data.console.output import table

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
