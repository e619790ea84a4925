"""Identifies processes of this machine by id and start time, since ids are used again."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def machine() -> str:
    """Returns a name that processes share if and only if they see each other's ids; "" if the system does not tell.

    It consists of the kernel's boot and the pid namespace, which differs between containers.
    """
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(PROC / 'self/ns/pid')}" if start_time(os.getpid()) else ""
    except OSError:
        return ""


def is_running(machine_name: str, pid: int, started: int) -> bool | None:
    """Returns True if a process of a machine is running; None if this process cannot tell."""
    if not machine_name or machine_name != machine():
        return None
    if (current := start_time(pid)) is not None:
        return current == started
    return None if is_hidden(pid) else False


def start_time(pid: int) -> int | None:
    """Returns the start of a process in ticks since the boot; None if it has ended or /proc hides it."""
    try:
        # The fields of proc(5) from the third on: the second is the name in parentheses, which may contain spaces.
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
    except (OSError, OverflowError):  # the latter for a number that no process can have
        return False
    return False  # /proc shows processes of the same user, so it has ended since
