"""A thread beside training that notices a run which hangs, says which rank is missing, and ends the process.

A rank that waits in a collective cannot be told to stop waiting. So each rank has a thread that gives signs of life
through the store by which the ranks found each other, raises an alarm when a step takes too long, and ends the process
once all ranks that can have told where they stand.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from armillary.core import compat
from armillary.core.commands import REFUSALS, one_line
from armillary.train.runtime.health.heartbeat import Heartbeat, main_stack, missing, recorded_calls, waits, where
from armillary.train.runtime.health.launcher import Launcher

SILENCE = 6.0
"""Seconds without a sign of life after which a rank is taken for dead or stopped."""

LONGER = 5
"""The first step, and what is no step of training, may take so many times as long as a step."""

ENDING = 20.0
"""Seconds that threads of others, such as one that saves, may keep a process whose training has failed."""


class Watchdog:
    """Sees to it that nothing waits for ever; a `with` block around all that ranks do together.

    It is told what is worked on (`begins`). If that takes too long, or another rank says so, every rank that still can
    prints which rank is missing and where it stands, writes the stacks of all its threads to `folder`/rank-N.txt,
    and ends its process with exit code 1. An error that leaves the block is printed in a line with rank and step; if it
    came from communication, the ranks that are missing follow. Where the run hung and they had been told before, that
    is what is raised instead, as a TimeoutError.

    A process whose launcher is gone ends at once. One that has lost the store by which the ranks speak to each other
    ends after `ENDING` seconds, unless its training ends by itself.

    Without a `with` block it only notes what it is told.

    Args:
        limit: seconds that a step of training may take.
        flag: what sets this limit, for whoever reads that it was too short.
        folder: where stacks are written to.
        program: that the ranks run, named in every line.
    """

    def __init__(self, limit: float, flag: str, folder: Path, program: str) -> None:
        self.limit, self.flag, self.folder, self.program = limit, flag, folder, program
        self.step, self.phase, self.under_way = 0, "starting", False
        self._allowed, self._since = LONGER * self.limit, time.monotonic()
        self._failure: str | None = None
        self._alarm: str | None = None
        self._hang: str | None = None
        self._over = self._failing = False
        self._launcher = Launcher()
        self._wake, self._told = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def begins(self, phase: str, step: int) -> None:
        """From now on this rank works on `phase` of `step`: "training", or something that may take longer."""
        longer = 1 if phase == "training" and self.under_way else LONGER
        self.under_way = self.under_way or phase == "training"
        self.step, self.phase, self._allowed, self._since = step, phase, longer * self.limit, time.monotonic()
        self._wake.set()

    def __enter__(self) -> Self:
        self._heartbeats = Heartbeats(dist.get_rank(), dist.get_world_size())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._report(error)
            if self._hang is not None and about_others(error):  # of a rank that has ended for the same reason
                raise TimeoutError(self._hang) from error
        else:
            self._over = True
            self._wake.set()
            self._thread.join(SILENCE)

    @contextmanager
    def reporting(self) -> Generator[None]:
        """Context manager that reports an error to all ranks at once, before any enclosing block handles it.

        It belongs inside of blocks whose exit waits for a thread or for other ranks: the ranks waited for may be the
        missing ones, and no rank names them until an error is reported. Does nothing outside of the watchdog's block.
        """
        try:
            yield
        except Exception as error:
            if self._thread.is_alive():
                self._report(error)
            raise

    def _report(self, error: Exception) -> None:
        """Posts the error for the other ranks; prints the missing ranks if they caused it. Only the first one counts.

        The process is about to end.
        """
        if self._failing:
            return
        failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        self._failing = True
        # Whoever refuses to start has a line of its own.
        if self.under_way or not isinstance(error, REFUSALS) or about_others(error):
            self._print(f"failed in {self._heartbeat().at}: {failure}")
        if about_others(error):
            self._alarm = f"in {self._heartbeat().at} another rank does not answer"
        else:
            self._failure = failure
        self._wake.set()
        self._told.wait(4 * SILENCE)

    def _watch(self) -> None:
        """What the thread does: gives signs of life until training ends, or someone is in trouble."""
        try:
            reason = self._wait_for_trouble()
            if reason is not None:
                self._print(*self._tell(reason))
        except RuntimeError as error:
            self._without_store(error)
        self._told.set()
        if not self._over:
            self._end()

    def _without_store(self, error: RuntimeError) -> None:
        """Waits whether training ends too, since whoever has the store has: the launcher, or another rank."""
        end = time.monotonic() + ENDING
        while not (self._over or self._failing) and time.monotonic() < end:
            self._end_without_launcher()
            time.sleep(0.1)
        if not self._over:
            self._print(f"the store by which the ranks speak to each other is gone: {one_line(str(error))}")

    def _end_without_launcher(self) -> None:
        """Ends the process where nobody is left who would restart it."""
        if self._launcher.gone:
            place, launcher = self._heartbeat().at, self._launcher.pid
            self._print(f"ends in {place}: torchrun (process {launcher}), which has started this rank, is gone")
            os._exit(1)

    def _wait_for_trouble(self) -> str | None:
        """Why the ranks are to tell where they stand; None when training has ended, well or not, by itself."""
        while not self._over:
            self._end_without_launcher()
            self._heartbeats.post(self._heartbeat())
            if self._failure is not None:
                return None
            if self._alarm is None and time.monotonic() - self._since > self._allowed:
                self._alarm = f"{self._heartbeat().at} takes longer than {self._allowed:g} s ({self.flag})"
            if (reason := self._heartbeats.alarm(self._alarm)) is not None:
                return reason
            self._wake.wait(min(1.0, self.limit / 20))
            self._wake.clear()
        return None

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self.step, self.phase, failure=self._failure)

    def _tell(self, reason: str) -> list[str]:
        """Tells where this rank stands, waits for the others to do so, and says who is missing."""
        stack, calls = main_stack(), recorded_calls()
        waiting = self._failing or waits(stack) or any(call.running for call in calls.values())
        self._heartbeats.post(Heartbeat(self.step, self.phase, where=where(stack), waits=waiting, calls=calls))
        beats, silent = self._heartbeats.gather()
        found = [f"missing: rank {rank}: {what}" for rank, what in missing(beats, silent).items()]
        said = [reason, *(found or ["no rank is missing: all wait for each other"])]
        if not self._failing:
            self._hang = "; ".join(said)
            _record(self._hang)
        return [*said, self._write(said, beats)]

    def _write(self, said: list[str], beats: dict[int, Heartbeat | None]) -> str:
        """Writes all that is known to a file; returns a line that says where."""
        path = self.folder / f"rank-{self._heartbeats.rank}.txt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                file.write("\n".join([*said, "", *(f"rank {rank}: {beat}" for rank, beat in beats.items()), "", ""]))
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            return f"where this rank stands cannot be written to {path}: {error.strerror}"
        return f"where this rank stands: {path}"

    def _end(self) -> None:
        """Ends the process: where training is stuck, or where it has failed and something else keeps the process."""
        time.sleep(SILENCE / 2)  # a failure of another rank makes training here fail at about the same time
        if self._over:
            return
        if self._failing:
            threading.main_thread().join()
            time.sleep(ENDING)
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(1)

    def _print(self, *lines: str) -> None:
        rank = self._heartbeats.rank
        with suppress(OSError):  # whoever has read this may be gone
            sys.stderr.write("".join(f"[rank {rank}] {self.program}: {line}\n" for line in lines))
            sys.stderr.flush()


def _record(said: str) -> None:
    """Leaves it where torchrun looks for the cause of a failure."""
    try:
        raise TimeoutError(said)  # what is recorded is what is being handled
    except TimeoutError as error:
        get_error_handler().record_exception(error)


def about_others(error: Exception) -> bool:
    """Whether an error came out of communication: another rank is gone, or did not come in time."""
    inside = isinstance(error, RuntimeError) and waits(traceback.extract_tb(error.__traceback__))
    return inside or isinstance(error, (TimeoutError, dist.DistError))


class Heartbeats:
    """Where ranks leave their heartbeats for each other: the store of the process group, on a connection of its own.

    For one thread; calls raise a RuntimeError when the store is gone.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        # A connection is locked while a thread waits on it, and training waits on the one there is.
        self._store = dist.PrefixStore("armillary/watchdog", compat.default_store().clone())
        self._store.set_timeout(timedelta(seconds=3 * SILENCE))
        self._count = 0

    def post(self, beat: Heartbeat) -> None:
        """Replaces this rank's heartbeat by this one."""
        self._count += 1
        self._store.set(f"rank-{self.rank}", f"{self._count} {beat.text()}")

    def alarm(self, reason: str | None) -> str | None:
        """Raises the alarm if there is a reason; the reason of whoever raised it first, None while all is well."""
        if reason is not None:
            return self._store.compare_set("alarm", "", reason).decode()
        return self._store.get("alarm").decode() if self._store.check(["alarm"]) else None

    def gather(self) -> tuple[dict[int, Heartbeat | None], set[int]]:
        """The last sign of each rank, and the ranks that give no more; waits for all others to tell of themselves."""
        posts = dict.fromkeys(range(self.ranks), "")
        since = dict.fromkeys(posts, time.monotonic())
        awaited, silent, end = set(posts), set[int](), time.monotonic() + 3 * SILENCE
        while awaited and time.monotonic() < end:
            for rank in sorted(awaited):
                post, now = self._last(rank), time.monotonic()
                if post != posts[rank]:
                    posts[rank], since[rank] = post, now
                if (beat := _heartbeat(post)) is not None and (beat.where or beat.failure):
                    awaited.discard(rank)
                elif now - since[rank] > SILENCE:
                    awaited.discard(rank)
                    silent.add(rank)
            time.sleep(0.05)
        return {rank: _heartbeat(post) for rank, post in posts.items()}, silent

    def _last(self, rank: int) -> str:
        key = f"rank-{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _heartbeat(post: str) -> Heartbeat | None:
    return Heartbeat.read(post.partition(" ")[2]) if post else None
