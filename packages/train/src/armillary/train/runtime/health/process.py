"""Identifies processes of this machine by id and start time, because the system reuses ids."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def machine() -> str:
    """Returns a name that processes share if and only if they see each other's process ids; "" if it is unknown.

    The name consists of the kernel's boot id and the pid namespace, which differs between containers.
    """
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(PROC / 'self/ns/pid')}" if start_time(os.getpid()) else ""
    except OSError:
        return ""


def is_running(machine_name: str, pid: int, started: int) -> bool | None:
    """Returns True if the process is running, False if it has ended, None if this process cannot tell.

    Args:
        machine_name: machine of the process, from `machine`.
        started: its start, from `start_time`.
    """
    if not machine_name or machine_name != machine():
        return None
    if (current := start_time(pid)) is not None:
        return current == started
    return None if is_hidden(pid) else False


def start_time(pid: int) -> int | None:
    """Returns the start of a process in clock ticks since the boot; None if it has ended or /proc hides it."""
    try:
        # See proc(5). Field 2 is the process's name in parentheses, which may contain spaces; `fields` begins at 3.
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    is_zombie = fields[0] in "ZX"  # it has ended, and its parent has not read the exit code yet
    return None if is_zombie else int(fields[19])  # `starttime`, field 22


def is_hidden(pid: int) -> bool:
    """Returns True if /proc hides a running process of another user."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):  # OverflowError: a number too large for a process id
        return False
    return False  # a process of the same user, which /proc would show: it has ended in the meantime
