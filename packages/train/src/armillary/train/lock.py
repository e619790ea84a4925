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
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self
from uuid import uuid4

import torch.distributed as dist
from pydantic import TypeAdapter

from armillary.core.internal import open_file, read_file, writing
from armillary.train.ranks import results_of_all

# Seconds between heartbeats of a holder.
BEAT = 5.0

# Seconds without a heartbeat after which a holder on another machine counts as dead.
TAKEOVER_TIMEOUT = 30.0

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
        machine: identity of the machine, from `machine`.
        started: start of the process, from `start_time`. Another process can get the same `pid` later.
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
            return cls.of(read_file(path))
        except (FileNotFoundError, ValueError):
            return None

    @classmethod
    def of(cls, content: bytes) -> Holder | None:
        """Returns the holder in the content of a lock's file; None if it is incomplete."""
        try:
            return TypeAdapter(cls).validate_json(content, strict=True)
        except ValueError:
            return None

    def is_running(self) -> bool | None:
        """Returns True if the process is running, False if it has ended, None if this process cannot tell."""
        if not self.machine or self.machine != machine():
            return None
        if (started := start_time(self.pid)) is not None:
            return started == self.started
        try:
            os.kill(self.pid, 0)  # sends no signal
        except PermissionError:  # a running process of another user, which /proc hides
            return None
        except (OSError, OverflowError):  # OverflowError: a number too large for a process id
            return False
        return False  # a process of the same user, which /proc would show: it has ended in the meantime

    def __str__(self) -> str:
        return f"run {self.run}, process {self.pid} on {self.host}, begun {self.since}"


def machine() -> str:
    """Returns a name that processes share if and only if they see each other's process ids; "" if it is unknown."""
    # The kernel's boot id, and the pid namespace, which differs between containers.
    try:
        with open_file("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().decode().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}" if start_time(os.getpid()) else ""
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """Returns the start of a process in clock ticks since the boot; None if it has ended or /proc hides it."""
    try:
        # See proc(5). Field 2 is the process's name in parentheses, which may contain spaces; `fields` begins at 3.
        with open_file(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    is_zombie = fields[0] in (b"Z", b"X")  # it has ended, and its parent has not read the exit code yet
    return None if is_zombie else int(fields[19])  # `starttime`, field 22


@dataclass(frozen=True)
class Claim:
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
        with suppress(OSError):  # the next heartbeat may succeed
            os.utime(self.path)

    def release(self) -> None:
        """Renames the file to `number`.released, unless another run has taken the lock."""
        with suppress(OSError, LockLost):  # if it fails, the next run still notices that this process has ended
            self.check()
            self.path.rename(self.path.with_suffix(".released"))


def take(folder: Path, holder: Holder, timeout: float, say: Callable[[str], None]) -> Claim:
    """Takes the lock in `folder`. `say` gets a line before a wait for heartbeats.

    Raises:
        FolderInUse: a run that is alive holds the lock; the message names it. One on another machine counts as dead
            after `timeout` seconds without a heartbeat.
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        # 1. The run with the highest number must have released the lock, or must be dead.
        number, is_held = newest(folder)
        if is_held:
            check_dead(folder / f"{number}.held", timeout, say)
        # 2. Claim the next number. Creating the file is atomic: of several processes, one creates it.
        claim = Claim(folder, number + 1, holder)
        try:
            file = claim.path.open("x")
        except FileExistsError:
            continue
        try:
            with writing(claim.path), file:
                file.write(json.dumps(asdict(holder)) + "\n")
        except OSError:
            claim.path.unlink()  # a file without a holder would look like the lock of an unknown run
            raise
        # 3. Yield to a run that has taken this number or a higher one, and perhaps released it, since step 1.
        numbers = {name: int(match[1]) for name in os.listdir(folder) if (match := NUMBERED.fullmatch(name))}
        numbers.pop(claim.path.name, None)
        if max(numbers.values(), default=0) >= claim.number:
            claim.path.unlink()
            continue
        for name in numbers:
            (folder / name).unlink(missing_ok=True)
        return claim


def newest(folder: Path) -> tuple[int, bool]:
    """Returns (highest number of a file, True if that file is "held"); (0, False) without files."""
    matches = [match for name in os.listdir(folder) if (match := NUMBERED.fullmatch(name))]
    return max(((int(match[1]), match[2] == "held") for match in matches), default=(0, False))


def check_dead(path: Path, timeout: float, say: Callable[[str], None]) -> None:
    """Raises FolderInUse if the holder of the lock file `path` is alive; returns if it has ended or has released it."""
    # One read for both: a file that is complete only at a second one would be that of an unknown run, without a
    # heartbeat until the next.
    last_heartbeat = heartbeat(path)
    holder = None if last_heartbeat is None else Holder.of(last_heartbeat[1])
    # On this machine the process table tells whether the holder is alive. For a holder on another machine, `is_running`
    # returns None, and its heartbeats tell.
    is_alive = None if holder is None else holder.is_running()
    if is_alive is None and last_heartbeat is not None:
        say(f"waiting {timeout:.0f} s for a heartbeat of {holder or 'an unknown run'} ({path})")
        is_alive = heartbeat_arrives(path, last_heartbeat, timeout)
    if is_alive:
        name = Holder.read(path) or holder or "another run"
        raise FolderInUse(f"{name} works in it; wait for that run, end it, or name another folder")


def heartbeat_arrives(path: Path, last_heartbeat: tuple[int, bytes], timeout: float) -> bool:
    """Returns True if a heartbeat arrives within `timeout` seconds; False if none does, or the file is gone."""
    # The modification time is not compared with this host's clock, since clocks differ.
    end = time.monotonic() + timeout
    while (current := heartbeat(path)) == last_heartbeat:
        if time.monotonic() > end:
            return False
        time.sleep(min(0.5, timeout / 10))
    return current is not None


def heartbeat(path: Path) -> tuple[int, bytes] | None:
    """Returns (modification time in ns, content) of a lock file, which heartbeats change; None if it does not exist."""
    # Not by `stat` alone, because network file systems refresh cached attributes on `open`.
    try:
        with open_file(path) as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise


class OutputLock:
    """Context manager that locks an output folder for all ranks; rank 0 holds the lock. Entering it is collective.

    Raises ValueError on every rank if another run holds the lock, or the folder cannot be written to; `flag` names it.
    """

    def __init__(
        self, output: Path, say: Callable[[str], None], timeout: float = TAKEOVER_TIMEOUT, flag: str = "output"
    ) -> None:
        self.output, self.say, self.timeout, self.flag = output, say, timeout, flag
        self.claim: Claim | None = None  # on rank 0
        self.run = ""  # name of this run
        self._lost_message = ""  # of the LockLost that a heartbeat raised; "" while the lock is held
        self._exited = threading.Event()

    def __enter__(self) -> Self:
        try:
            self.run = results_of_all(self._take)[0]
        except BaseException:  # also after ^C the lock must be released
            self.__exit__(None, None, None)
            raise
        if self.claim is not None:
            threading.Thread(target=self._beat, args=(self.claim,), name="output lock", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._exited.set()
        if self.claim is not None:
            self.claim.release()

    def fence(self) -> None:
        """Reads the lock; raises LockLost if another run has taken it, and OSError if it cannot be read.

        Call it on rank 0 right before a change that other runs see. Does nothing on other ranks.
        """
        if self.claim is not None:
            self.claim.check()

    def check(self) -> None:
        """Raises LockLost if the latest heartbeat found that another run has taken the lock. Reads no file."""
        if self._lost_message:
            raise LockLost(self._lost_message)

    def _take(self) -> str:
        if dist.get_rank() != 0:
            return ""
        holder = Holder.this_process()
        try:
            self.claim = take(self.output / "lock", holder, self.timeout, self.say)
        except FolderInUse as error:
            raise ValueError(f"{self.flag} {self.output}: {error}") from error
        except OSError as error:
            reason = f"cannot be written to ({error.strerror}: {error.filename}); name another folder"
            raise ValueError(f"{self.flag} {self.output}: {reason}") from error
        return holder.run

    def _beat(self, claim: Claim) -> None:
        # In a thread, until the block exits or another run has taken the lock.
        while not self._exited.wait(BEAT):
            claim.beat()
            try:
                claim.check()
            except LockLost as lost:
                # A lock that this run has just released is not lost.
                self._lost_message = "" if self._exited.is_set() else str(lost)
                return
            except OSError:
                continue  # a network file system may not answer for a while
