"""How commands end: one readable line and an exit code, for whatever their users can mend."""

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
"""Exit codes: it cannot be started or done as asked; it failed on the way; ^C."""

REFUSALS = (ValueError, ImportError, OSError)
"""What is raised for arguments, files and packages that will not do."""


class DamagedInput(ValueError):
    """A file that is read as work goes on does not hold what was written."""


FAILING = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EIO", "EPIPE", "ENOMEM", "EMFILE", "ENFILE", "ESTALE", "ECHILD", "EAGAIN")
)
"""Of an `OSError` whose path is as good as any: the machine failed."""

ELSEWHERE = (TimeoutError, ConnectionError)
"""Likewise: others did not answer."""


@contextmanager
def ending(program: str, started: Callable[[], bool] = lambda: False) -> Generator[None]:
    """Ends the process with one line on stderr where the block raises something that its user can mend.

    That is `REFUSALS`, which end it with 2, or 1 where a disk fails. Anything else is an error of ours and keeps its
    traceback, as does everything that is raised once the work has `started`.
    """
    try:
        yield
    except KeyboardInterrupt:
        leave(program, "stopped", INTERRUPTED)
    except REFUSALS as error:
        if started():
            raise
        failed = isinstance(error, OSError) and (error.errno in FAILING or isinstance(error, ELSEWHERE))
        leave(program, described(error), FAILED if failed else REFUSED)


def leave(program: str, why: str, code: int) -> None:
    """Says why, and ends the process.

    Under torchrun the line goes into this rank's error file too, from where torchrun prints it as the cause when all
    ranks have ended, and only the first rank of each host prints it besides: mostly it is the same on all of them.
    """
    rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    line = f"{rank}{program}: {one_line(why)}"
    recorded = record(line)
    if not recorded or os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
    sys.exit(code)


def record(line: str) -> bool:
    """Leaves a line where torchrun looks for the cause of a failure; whether there is such a place.

    torch's own `record` would put a traceback there. A message that is text is shown as it is, behind "traceback : ":
    on a line of its own, then.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    with suppress(OSError):
        if path:
            Path(path).write_text(json.dumps({"message": f"\n{line}", "timestamp": str(int(time.time()))}))
            return True
    return False


def described(error: Exception) -> str:
    """The error in words; of an `OSError` the file and the reason, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part is not None)
    return str(error) or type(error).__name__


def one_line(text: str) -> str:
    """Text without line breaks, and with what a terminal would not show as it is escaped, such as in a file's name."""
    joined = " ".join(line.strip() for line in text.splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in joined)
