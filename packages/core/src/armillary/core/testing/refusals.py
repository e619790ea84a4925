"""What commands and calls say that refuse what cannot be done, in this process."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout

from armillary.core.observe.ledger import CommLedger


def refusal(main: Callable[[Sequence[str]], object], argv: Sequence[object]) -> str:
    """The line with which a command refuses its arguments.

    Raises:
        AssertionError: it did not, or with another exit code than 2, or said more or less than one line.
    """
    out, err = io.StringIO(), io.StringIO()
    words = [str(word) for word in argv]
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(words)
            code = 0
        except SystemExit as stop:
            code = stop.code
    lines = err.getvalue().splitlines()
    assert (code, len(lines), out.getvalue()) == (2, 1, ""), f"{words}: exit code {code}, {out.getvalue()}, {lines}"
    return lines[0]


def value_errors(calls: Sequence[Callable[[], object]]) -> list[str]:
    """What each call refuses with.

    Raises:
        AssertionError: one raised no ValueError, or had sent something first.
    """
    with CommLedger() as ledger:
        found = [_value_error(number, call) for number, call in enumerate(calls)]
    assert ledger.bytes() == 0, ledger.table()
    return found


def _value_error(number: int, call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError(f"call {number} was not refused")
