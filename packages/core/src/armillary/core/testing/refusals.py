"""For tests of wrong arguments: the error messages of commands and of calls."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout

from armillary.core.observe import CommLedger


def refusal(main: Callable[[Sequence[str]], object], argv: Sequence[object]) -> str:
    """Returns the line that a command prints on stderr for wrong arguments.

    Raises:
        AssertionError: the command did not exit with code 2, or did not print exactly one line, on stderr.
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
    """Returns the message of the ValueError that each call raises.

    Raises:
        AssertionError: a call raised no ValueError, or sent bytes to another rank before.
    """
    with CommLedger() as ledger:
        messages = [_value_error(number, call) for number, call in enumerate(calls)]
    assert ledger.bytes() == 0, ledger.table()
    return messages


def _value_error(number: int, call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError(f"call {number} was not refused")
