"""Exits of commands: an expected error is printed in one line on stderr and decides the exit code."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from armillary.core.internal import read_file
from armillary.data.errors import DamagedInput

REFUSED, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes: for invalid arguments or input; for work that failed or found no answer; for ^C."""

REFUSALS = (ValueError, ImportError, OSError)
"""Errors raised for invalid arguments, unusable files and missing packages."""


EXPLAINED = (FloatingPointError, DamagedInput, OSError)
"""Errors raised with a message that says everything, so that they need no traceback."""

MACHINE_ERRORS = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EIO", "EPIPE", "ENOMEM", "EMFILE", "ENFILE", "ESTALE", "ECHILD", "EAGAIN")
)
"""`OSError` numbers for which the machine is to blame, not the path."""

OUT_OF_MEMORY = re.compile("out of memory|allocate memory", re.IGNORECASE)
"""Matches the messages of torch, CUDA and NCCL if memory is exhausted."""

PEER_ERRORS = (TimeoutError, ConnectionError)
"""Subclasses of `OSError` for which another process is to blame."""


@contextmanager
def exit_on_error(program: str, is_started: Callable[[], bool] = lambda: False) -> Generator[None]:
    """Context manager that prints an error of its block in one line and ends the process.

    The exit code is 2 for errors in `REFUSALS`, or 1 if the machine or another process failed, as when memory is short;
    130 for ^C. Other errors keep their traceback, and so do all errors after the work has begun.

    Args:
        is_started: returns True once the work has begun.
    """
    try:
        yield
    except KeyboardInterrupt:
        exit_with(program, "stopped", INTERRUPTED)
    except Exception as error:
        if needs_no_traceback(error) and not is_started():
            failed = isinstance(error, OSError) and (error.errno in MACHINE_ERRORS or isinstance(error, PEER_ERRORS))
            exit_with(program, describe_error(error), FAILED if failed or is_out_of_memory(error) else REFUSED)
        # Without torchrun Python prints the traceback. With it every rank would, and torchrun again for every rank.
        if error_file() is not None and report_failure(program, "failed", error=error):
            sys.exit(FAILED)
        raise


def needs_no_traceback(error: Exception) -> bool:
    """Returns True if the message of an error explains why a command has not begun its work."""
    return isinstance(error, REFUSALS) or is_out_of_memory(error)


def is_out_of_memory(error: Exception) -> bool:
    """Returns True if memory is exhausted, or would be by this allocation."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None
    )


@contextmanager
def flag_in_errors(flag: str) -> Generator[None]:
    """Puts a flag in front of the message of a ValueError of its block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error


def exit_with(program: str, reason: str, code: int) -> NoReturn:
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
    print(*map(printable, lines), sep="\n", flush=True)


# -- reports of failures ----------------------------------------------------------------------------------------------


class FirstFailure(NamedTuple):
    """The first report among the ranks of one torchrun: its rank, its last line, and its time in seconds."""

    rank: str
    cause: str
    time: float


def error_file() -> Path | None:
    """Returns the file in which torchrun expects the error of this rank; None without torchrun."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None


def report_failure(
    program: str,
    *lines: str,
    error: BaseException | None = None,
    rank: int | str | None = None,
    caused_by_peers: bool = False,
    begin: float | None = None,
) -> bool:
    """Reports why this rank ends; a later report of the same process is ignored.

    The report goes to torchrun's error file. It is also printed on stderr if torchrun will not print the file: if there
    is none, if torchrun restarts the ranks, or if it forked them, because then it prints the error of only one.

    Args:
        lines: the report; the last line is the cause.
        error: an exception that completes the last line. The error file has its traceback too.
        rank: the rank of this process; by default torchrun's.
        caused_by_peers: other ranks report the same cause, so this report is left out if it is not the first.
        begin: a time before the failure, in seconds; by default now. torchrun dates a killed rank when it notices its
            end, and shows the earliest report as the root cause.

    Returns:
        True if the report is in torchrun's error file.
    """
    rank = os.environ.get("RANK") if rank is None else str(rank)
    prefix = f"{program}: " if rank is None else f"[rank {rank}] {program}: "
    *context, cause = map(printable, lines)
    if error is not None:
        cause += printable(f": {type(error).__name__}: {error}")
    path = error_file()
    if path is None:  # Python prints the traceback, and the whole message with it
        write_to_stderr("".join(f"{prefix}{line}\n" for line in (*context, cause.splitlines()[0])))
        return False
    if path.exists():
        return True
    # torchrun prints the error files of all its ranks when it ends, and the earliest one last, as the root cause.
    # 1. The first rank that fails writes the whole report, dated before those of all others. Ranks that end because of
    # it write only which rank that is.
    text = "".join(f"{prefix}{line}\n" for line in (*context, cause))
    if error is not None:  # its frames and those of its causes, without its own message, which `cause` has
        message = "".join(traceback.format_exception_only(error))
        text = "".join(traceback.format_exception(error)).removesuffix(message) + text
    prints_all_ranks = multiprocessing.parent_process() is None  # torchrun started them as commands, not as forks
    date, is_repetition = begin or time.time(), False
    first = first_failure(path, FirstFailure(rank or "0", cause, date))
    if first is not None:
        date, is_repetition = max(time.time(), first.time + 1), caused_by_peers or first.cause == cause
        if is_repetition and prints_all_ranks:
            text = f"{prefix}ended; rank {first.rank} reports the cause\n"
    # 2. The format is that of torch's `record`, which would write a traceback even for errors that need none.
    # torchrun prints "traceback : " before the text, which therefore begins with a line break.
    details = {"py_callstack": "\n" + text.rstrip(), "timestamp": str(int(date))}
    is_recorded = False
    with suppress(OSError):
        path.write_text(json.dumps({"message": {"message": cause, "extraInfo": details}}))
        is_recorded = True
    # 3. torchrun prints error files only when it ends, not when it restarts the ranks.
    restarts, limit = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if not is_recorded or (not is_repetition and (restarts < limit or not prints_all_ranks)):
        write_to_stderr(text)
    return is_recorded


def first_failure(path: Path, failure: FirstFailure) -> FirstFailure | None:
    """Returns the first failure of a rank of this torchrun; None if it is `failure`.

    Args:
        path: this rank's error file, ATTEMPT/LOCAL_RANK/error.json. The first rank creates a file in ATTEMPT.
    """
    attempt = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    if path.parts[-3:-1] != (attempt, os.environ.get("LOCAL_RANK")):
        return None  # another layout, in which the ranks may not share this folder, or may share it with another run
    own, first = path.with_name("failure.json"), path.parents[1] / "first-failure.json"
    try:
        own.write_text(json.dumps(failure))
        os.link(own, first)  # creates the file complete, and only once
    except FileExistsError:
        return FirstFailure(*json.loads(read_file(first)))
    except OSError:
        pass  # a file system without links: every rank reports
    return None


def printable(text: str) -> str:
    """Returns the text with unprintable characters escaped, except line feeds."""
    # Names and values in files may have escape codes, which would control the terminal.
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def write_to_stderr(text: str) -> None:
    with suppress(OSError):  # the process that reads this output may be gone
        sys.stderr.write(text)
        sys.stderr.flush()
