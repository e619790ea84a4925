"""One run at a time works in an output folder, and one that has lost it to another leaves it alone.

The folder `lock` holds `N.held`, by the run that works there, or `N.released`, by the one that did last. Whoever takes
the lock makes the next number, which only one can. So the number is a fencing token: a run whose number is not the
highest has lost the folder, and must not change it.
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
from typing import Any
from uuid import uuid4

from armillary.core.files import parse_json, writing
from armillary.train.runtime.health.process import machine, running, start_of

NUMBERED = re.compile(r"(\d+)\.(held|released)")


class LockLost(RuntimeError):
    """Another run has taken the output folder: this one must leave it alone."""


class Refused(Exception):
    """The folder belongs to another run."""


@dataclass(frozen=True)
class Holder:
    """A run, and its process that changes the folder (rank 0).

    Args:
        run: names the run.
        machine, started: tell the process from others with its id on other machines and at other times; see `process`.
        since: ISO 8601 in UTC.
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
        return cls(uuid4().hex[:12], socket.gethostname(), machine(), pid, start_of(pid) or 0, now)

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """None: it is not there, or not written to its end."""
        try:
            found = parse_json(path.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        kinds = {"run": str, "host": str, "machine": str, "pid": int, "started": int, "since": str}
        whole = isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in kinds.items())
        return cls(**{name: found[name] for name in kinds}) if whole else None

    def __str__(self) -> str:
        return f"run {self.run}, process {self.pid} on {self.host}, begun {self.since}"


@dataclass(frozen=True)
class Claim:
    """The hold of a run on a folder."""

    folder: Path
    number: int
    holder: Holder

    @property
    def path(self) -> Path:
        return self.folder / f"{self.number}.held"

    def check(self) -> None:
        """Raises `LockLost` where it holds no more, an OSError where that cannot be seen."""
        number, held = newest(self.folder)
        if number > self.number:
            after = Holder.read(self.folder / f"{number}.held")
            raise LockLost(f"{self.folder.parent} was taken over by {after or 'another run'}; this is {self.holder}")
        if not held or Holder.read(self.path) != self.holder:
            raise LockLost(f"{self.path} is no longer that of {self.holder}")

    def beat(self) -> None:
        """Gives a sign of life."""
        with suppress(OSError):  # the next one may come through
            os.utime(self.path)

    def release(self) -> None:
        """Lets others have the folder at once."""
        with suppress(OSError, LockLost):  # whoever comes next finds that this process is gone
            self.check()
            self.path.rename(self.path.with_suffix(".released"))


def take(folder: Path, holder: Holder, silent: float, say: Callable[[str], None]) -> Claim:
    """Takes the lock that `folder` is.

    Raises:
        Refused: another run has it that is alive; names it.
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        number, held = newest(folder)
        if held:
            check_gone(folder / f"{number}.held", silent, say)
        claim = Claim(folder, number + 1, holder)
        if write(claim) and clear(claim):
            return claim


def write(claim: Claim) -> bool:
    """Makes the file; False if somebody else has made it."""
    try:
        file = claim.path.open("x")
    except FileExistsError:
        return False
    try:
        with writing(claim.path), file:
            file.write(json.dumps(asdict(claim.holder)) + "\n")
    except OSError:
        claim.path.unlink()
        raise
    return True


def clear(claim: Claim) -> bool:
    """Removes older numbers; False if others have taken this one, or a higher one, meanwhile, and that is given up."""
    for name in os.listdir(claim.folder):
        if (match := NUMBERED.fullmatch(name)) is None or name == claim.path.name:
            continue
        if int(match[1]) >= claim.number:
            claim.path.unlink()
            return False
        (claim.folder / name).unlink(missing_ok=True)
    return True


def newest(folder: Path) -> tuple[int, bool]:
    """(the highest number, whether it is held)."""
    found = [match for name in os.listdir(folder) if (match := NUMBERED.fullmatch(name))]
    return max(((int(match[1]), match[2] == "held") for match in found), default=(0, False))


def check_gone(path: Path, silent: float, say: Callable[[str], None]) -> None:
    """Returns when the holder of this lock is gone, or has let go of it; raises `Refused` where it is alive."""
    holder, first = Holder.read(path), mark(path)
    alive = None if holder is None else running(holder.machine, holder.pid, holder.started)
    if alive is None and first is not None:
        say(f"waiting {silent:.0f} s for a sign of life of {holder or 'a run that has not told its name'} ({path})")
        alive = changes(path, first, silent)
    if alive:
        named = Holder.read(path) or holder or "another run"
        raise Refused(f"{named} works in it; wait for that run, end it, or name another folder")


def changes(path: Path, first: Any, silent: float) -> bool:
    """Whether there is a sign of life within so many seconds; no clock of another host is asked."""
    end = time.monotonic() + silent
    while (now := mark(path)) == first:
        if time.monotonic() > end:
            return False
        time.sleep(min(0.5, silent / 10))
    return now is not None


def mark(path: Path) -> tuple[int, bytes] | None:
    """What a sign of life changes; None where the file is gone. Opened, since a network file system then looks anew."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise
