"""Exits of commands: an expected error is printed in one line on stderr and decides the exit code."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

REFUSED, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes: for invalid arguments or input; for work that failed or found no answer; for ^C."""

REFUSALS = (ValueError, ImportError, OSError)
"""Errors raised for invalid arguments, unusable files and missing packages."""


class DamagedInput(ValueError):
    """A file is damaged. If the work has begun, `armillary-train` exits with `FAILED` for it, not with `REFUSED`."""


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
    except REFUSALS as error:
        if is_started():
            raise
        failed = isinstance(error, OSError) and (error.errno in MACHINE_ERRORS or isinstance(error, PEER_ERRORS))
        exit_with(program, describe_error(error), FAILED if failed else REFUSED)


def exit_with(program: str, reason: str, code: int) -> None:
    """Prints the reason in one line and ends the process with exit code `code`.

    Under torchrun the line is also recorded as this rank's error, which torchrun prints when all ranks have ended. Most
    errors are the same on all ranks, so only the first rank of each host prints a recorded line here too.
    """
    rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    line = f"{rank}{program}: {one_line(reason)}"
    recorded = record(line)
    if not recorded or os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
    sys.exit(code)


def record(line: str) -> bool:
    """Writes a line to torchrun's error file of this rank; returns False if there is none or it cannot be written.

    torch's own `record` would write a traceback. torchrun prints the text after "traceback : ", so the line begins with
    a line break.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    with suppress(OSError):
        if path:
            Path(path).write_text(json.dumps({"message": f"\n{line}", "timestamp": str(int(time.time()))}))
            return True
    return False


def describe_error(error: Exception) -> str:
    """Returns the message of an error; of an `OSError`, file and reason without the number."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part is not None)
    return str(error) or type(error).__name__


def one_line(text: str) -> str:
    """Returns the text without line breaks, `printable`."""
    return printable(" ".join(line.strip() for line in text.splitlines()))


def printable(text: str) -> str:
    """Returns the text with unprintable characters escaped, except line feeds.

    For all that commands print: names and values in files may have escape codes, which would control the terminal.
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def print_lines(*lines: str) -> None:
    """Prints lines, `printable`, on stdout."""
    print(*map(printable, lines), sep="\n", flush=True)
