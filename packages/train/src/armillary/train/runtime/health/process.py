"""Whether a process of this machine still runs: by its id and the time at which it was started, so that no other will
do that has been given the same id since."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def machine() -> str:
    """The same for processes that see each other's ids: of one boot of one kernel, in one pid namespace (a container
    has its own). Empty where the system does not tell."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(PROC / 'self/ns/pid')}" if start_of(os.getpid()) else ""
    except OSError:
        return ""


def running(where: str, pid: int, started: int) -> bool | None:
    """Whether a process of the machine `where` still runs; None where that cannot be told from here."""
    if not where or where != machine():
        return None
    if (found := start_of(pid)) is not None:
        return found == started
    return None if hidden(pid) else False


def start_of(pid: int) -> int | None:
    """When a process was started, in ticks since the boot; None if it has ended or is not seen."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    ended = fields[0] in "ZX"  # its parent has not asked for the exit code yet
    return None if ended else int(fields[19])


def hidden(pid: int) -> bool:
    """Whether /proc does not show a process of another user that is there."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):  # the latter of a number that is no process's
        return False
    return False  # ours, and so seen: it has ended
