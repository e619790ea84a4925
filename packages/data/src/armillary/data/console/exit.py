"""Exits of commands: an expected error is printed in one line on stderr and decides the exit code."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NoReturn

from armillary.data.console.failure import error_file, printable, report_failure

REFUSED, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes: for invalid arguments or input; for work that failed or found no answer; for ^C."""

REFUSALS = (ValueError, ImportError, OSError)
"""Errors raised for invalid arguments, unusable files and missing packages."""


class DamagedInput(ValueError):
    """A file is damaged. If the work has begun, `armillary-train` exits with `FAILED` for it, not with `REFUSED`."""


EXPLAINED = (FloatingPointError, DamagedInput, OSError)
"""Errors raised with a message that says everything, so that they need no traceback."""

MACHINE_ERRORS = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EIO", "EPIPE", "ENOMEM", "EMFILE", "ENFILE", "ESTALE", "ECHILD", "EAGAIN")
)
"""`OSError` numbers for which the machine is to blame, not the path."""

PEER_ERRORS = (TimeoutError, ConnectionError)
"""Subclasses of `OSError` for which another process is to blame."""


@contextmanager
def exit_on_error(program: str, is_started: Callable[[], bool] = lambda: False) -> Generator[None]:
    """Context manager that prints an error of its block in one line and ends the process.

    The exit code is 2 for errors in `REFUSALS`, or 1 if the machine or another process failed; 130 for ^C. Other errors
    keep their traceback, and so do the errors of `REFUSALS` after the work has begun.

    Args:
        is_started: returns True once the work has begun.
    """
    try:
        yield
    except KeyboardInterrupt:
        exit_with(program, "stopped", INTERRUPTED)
    except Exception as error:
        if isinstance(error, REFUSALS) and not is_started():
            failed = isinstance(error, OSError) and (error.errno in MACHINE_ERRORS or isinstance(error, PEER_ERRORS))
            exit_with(program, describe_error(error), FAILED if failed else REFUSED)
        # Without torchrun Python prints the traceback. With it every rank would, and torchrun again for every rank.
        if error_file() is not None and report_failure(program, "failed", error=error):
            sys.exit(FAILED)
        raise


def exit_with(program: str, reason: str, code: int) -> NoReturn:
    """Reports the reason in one line and ends the process with exit code `code`. See `report_failure`."""
    report_failure(program, one_line(reason))
    sys.exit(code)


def describe_error(error: Exception) -> str:
    """Returns the message of an error; of an `OSError`, file and reason without the number."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part is not None)
    return str(error) or type(error).__name__


def one_line(text: str) -> str:
    """Returns the text without line breaks, `printable`."""
    return printable(" ".join(line.strip() for line in text.splitlines()))


def print_lines(*lines: str) -> None:
    """Prints lines, `printable`, on stdout."""
    print(*map(printable, lines), sep="\n", flush=True)
