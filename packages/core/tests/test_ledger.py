"""The byte ledger: its counts and its table."""

from inspect import cleandoc

from armillary.core import CommLedger
from armillary.core.internal import phase
from armillary.core.ledger import format_bytes

TABLE = """\
axis     kind                            forward                     backward                        total  messages
ring     p2p                  49,152  48.000 KiB          122,880 120.000 KiB          172,032 168.000 KiB         9
ulysses  all_to_all           65,536  64.000 KiB           65,536  64.000 KiB          131,072 128.000 KiB         8
total                        114,688 112.000 KiB          188,416 184.000 KiB          303,104 296.000 KiB        17
"""


def booked() -> CommLedger:
    with CommLedger() as ledger:
        CommLedger.add("ring", "p2p", 48 * 1024, 3)
        CommLedger.add("ulysses", "all_to_all", 64 * 1024, 4)
        with phase("backward"):
            CommLedger.add("ring", "p2p", 120 * 1024, 6)
            CommLedger.add("ulysses", "all_to_all", 64 * 1024, 4)
            CommLedger.add("tp", "all_gather", 0, 0)
    return ledger


def test_ledgers_nest_and_stop_counting_when_closed():
    with CommLedger() as outer:
        CommLedger.add("ring", "p2p", 5)
        with CommLedger() as inner:
            CommLedger.add("ulysses", "all_to_all", 7)
        CommLedger.add("ring", "p2p", 1)
    CommLedger.add("ring", "p2p", 100)
    assert (outer.bytes(), outer.bytes(axis="ring"), outer.bytes(kind="all_to_all")) == (13, 6, 7)
    assert (inner.bytes(), inner.bytes(phase="backward")) == (7, 0)


def test_counts_of_messages_and_the_table_of_the_docstring():
    ledger = booked()
    assert (ledger.messages(), ledger.messages(axis="ring"), ledger.messages(phase="backward")) == (17, 9, 10)
    assert ledger.table() == TABLE.rstrip("\n")
    assert TABLE in cleandoc(CommLedger.__doc__ or "")


def test_tables_of_several_kinds_of_large_numbers_and_of_nothing():
    with CommLedger() as ledger:
        CommLedger.add("ring", "p2p", 0, 0)
        assert ledger.table() == "nothing was sent"
        CommLedger.add("ring", "p2p", 123_456_789_012, 3)
        CommLedger.add("ring", "all_gather", 8, 1)
    lines = ledger.table().splitlines()
    assert "  123,456,789,012 114.978 GiB  " in lines[2] and len({len(line) for line in lines}) == 1
    rows = [line.split() for line in lines[1:3]]
    assert [(kind, messages) for _, kind, *_, messages in rows] == [("all_gather", "1"), ("p2p", "3")]
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.000 KiB", 1_744_830_464: "1.625 GiB"}
    assert {size: format_bytes(size) for size in sizes} == sizes
