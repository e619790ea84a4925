"""The lock of an output folder: one run at a time writes there, and a run that has lost the lock stops writing.

While a run holds the lock, the folder `lock` contains its file `N.held`, which it renames to `N.released` at its end. A
run takes the lock by creating the file with the next number. The file system lets only one process create it. The
number is a fencing token: a run whose number is no longer the highest has lost the lock.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from pydantic import TypeAdapter

from armillary.core.parts import open_file, read_file, writing
from armillary.train.runtime.health.process import is_running, machine, start_time

NUMBERED = re.compile(r"(\d+)\.(held|released)")


class LockLost(RuntimeError):
    """Another run has taken the output folder, which this run must no longer change."""


class FolderInUse(Exception):
    """Another run that is alive holds the lock of the folder."""


@dataclass(frozen=True)
class Holder:
    """A run, and its process that changes the folder (rank 0).

    Args:
        run: a random name of the run.
        host: name of the machine, for messages.
        machine: identity of the machine, from `process.machine`.
        started: start of the process, from `process.start_time`. Another process can get the same `pid` later.
        since: time at which the run asked for the lock, ISO 8601 in UTC.
    """

    run: str
    host: str
    machine: str
    pid: int
    started: int
    since: str

    @classmethod
    def this_process(cls) -> Holder:
        pid, now = os.getpid(), datetime.now(UTC).isoformat(timespec="seconds")
        return cls(uuid4().hex[:12], socket.gethostname(), machine(), pid, start_time(pid) or 0, now)

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """Returns the holder in a lock's file; None if the file does not exist or is incomplete."""
        try:
            return TypeAdapter(cls).validate_json(read_file(path), strict=True)
        except (FileNotFoundError, ValueError):
            return None

    def __str__(self) -> str:
        return f"run {self.run}, process {self.pid} on {self.host}, begun {self.since}"


@dataclass(frozen=True)
class Claim:
    """A run's lock file `number`.held in `folder`, and the run."""

    folder: Path
    number: int
    holder: Holder

    @property
    def path(self) -> Path:
        return self.folder / f"{self.number}.held"

    def check(self) -> None:
        """Raises LockLost if another run holds the lock, and OSError if the folder cannot be read."""
        number, is_held = newest(self.folder)
        if number > self.number:
            successor = Holder.read(self.folder / f"{number}.held")
            raise LockLost(
                f"{self.folder.parent} was taken over by {successor or 'another run'}; this is {self.holder}"
            )
        if not is_held or Holder.read(self.path) != self.holder:
            raise LockLost(f"{self.path} no longer belongs to {self.holder}")

    def beat(self) -> None:
        """Posts a heartbeat: a new modification time."""
        with suppress(OSError):  # the next heartbeat may succeed
            os.utime(self.path)

    def release(self) -> None:
        """Renames the file to `number`.released, unless another run has taken the lock."""
        with suppress(OSError, LockLost):  # if it fails, the next run still notices that this process has ended
            self.check()
            self.path.rename(self.path.with_suffix(".released"))


def take(folder: Path, holder: Holder, timeout: float, say: Callable[[str], None]) -> Claim:
    """Takes the lock in `folder`.

    Args:
        timeout: seconds without a heartbeat after which a holder on another machine counts as dead.
        say: called with a line before a wait for heartbeats.

    Raises:
        FolderInUse: a run that is alive holds the lock; the message names it.
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        number, is_held = newest(folder)
        if is_held:
            check_dead(folder / f"{number}.held", timeout, say)
        # Tries again if another process has created this number or a higher one since `newest` read the folder.
        claim = Claim(folder, number + 1, holder)
        if write(claim) and clear(claim):
            return claim


def write(claim: Claim) -> bool:
    """Creates the file of a claim; returns False if another process has created it before."""
    try:
        file = claim.path.open("x")  # atomic: of several processes, one creates the file
    except FileExistsError:
        return False
    try:
        with writing(claim.path), file:
            file.write(json.dumps(asdict(claim.holder)) + "\n")
    except OSError:
        claim.path.unlink()  # a file without a holder would look like the lock of an unknown run
        raise
    return True


def clear(claim: Claim) -> bool:
    """Removes files with lower numbers; returns True.

    If another run has a file with this number or a higher one, removes the claim's own file and returns False.
    """
    for name in os.listdir(claim.folder):
        if (match := NUMBERED.fullmatch(name)) is None or name == claim.path.name:
            continue
        if int(match[1]) >= claim.number:  # another run has taken the lock, and perhaps released it, in the meantime
            claim.path.unlink()
            return False
        (claim.folder / name).unlink(missing_ok=True)
    return True


def newest(folder: Path) -> tuple[int, bool]:
    """Returns (highest number of a file, True if that file is "held"); (0, False) without files."""
    matches = [match for name in os.listdir(folder) if (match := NUMBERED.fullmatch(name))]
    return max(((int(match[1]), match[2] == "held") for match in matches), default=(0, False))


def check_dead(path: Path, timeout: float, say: Callable[[str], None]) -> None:
    """Raises FolderInUse if the holder of the lock file `path` is alive; returns if it has ended or has released it."""
    holder, last_heartbeat = Holder.read(path), heartbeat(path)
    # On this machine the process table tells whether the holder is alive. `is_running` returns None for a holder on
    # another machine, whose heartbeats tell.
    alive = None if holder is None else is_running(holder.machine, holder.pid, holder.started)
    if alive is None and last_heartbeat is not None:
        say(f"waiting {timeout:.0f} s for a heartbeat of {holder or 'an unknown run'} ({path})")
        alive = heartbeat_arrives(path, last_heartbeat, timeout)
    if alive:
        name = Holder.read(path) or holder or "another run"
        raise FolderInUse(f"{name} works in it; wait for that run, end it, or name another folder")


def heartbeat_arrives(path: Path, last_heartbeat: tuple[int, bytes], timeout: float) -> bool:
    """Returns True if a heartbeat arrives within `timeout` seconds; False if none does, or the file is gone.

    Waits for the file to change. Its modification time is not compared with this host's clock, since clocks differ.
    """
    end = time.monotonic() + timeout
    while (current := heartbeat(path)) == last_heartbeat:
        if time.monotonic() > end:
            return False
        time.sleep(min(0.5, timeout / 10))
    return current is not None


def heartbeat(path: Path) -> tuple[int, bytes] | None:
    """Returns (modification time in ns, content) of a lock file; None if it does not exist. Heartbeats change the time.

    Opens the file instead of calling `stat`, because network file systems refresh cached attributes on `open`.
    """
    try:
        with open_file(path) as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise
