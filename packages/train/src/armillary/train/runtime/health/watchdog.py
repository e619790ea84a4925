"""A thread that detects a hung run, names the missing ranks and ends the process.

A rank that waits in a collective cannot be interrupted. So each rank has a thread that posts heartbeats in the store of
the rendezvous, and raises an alarm when a step takes too long. After an alarm, every live rank posts its state; then
each thread names the missing ranks, those that the others wait for (dead or hung), and ends its process.
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

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from armillary.core import compat
from armillary.data.console.exit import REFUSALS, one_line
from armillary.train.runtime.health.heartbeat import Heartbeat, missing_ranks, recorded_calls
from armillary.train.runtime.health.launcher import Launcher
from armillary.train.runtime.health.stacks import communicates, current_stack, location_of, waits

SILENCE = 6.0
"""Seconds without a heartbeat after which a rank counts as dead."""

SLOW_PHASE_FACTOR = 5
"""Factor on the time-out of a step, for the first step and for phases other than training."""

GRACE = 20.0
"""Seconds that other threads, such as one that saves, may continue after training has failed."""


class Watchdog:
    """Context manager that ends a hung run: detects missing ranks, dumps their stacks and exits.

    `start_phase` sets the time that the current work may take. When it takes longer, or another rank raises the alarm,
    every live rank prints the missing ranks, writes the stacks of all its threads to `folder`/rank-N.txt and ends its
    process with exit code 1. An error that leaves the block is printed in one line with rank and step; if communication
    raised it, the missing ranks are printed too. If they had been named before, a TimeoutError with their names
    replaces the error.

    The process ends at once when its launcher has died. When the store is gone, it ends after `GRACE` seconds unless
    training ends first.

    Outside of a `with` block only `start_phase` has an effect, and no thread runs.

    Args:
        limit: seconds that a step of training may take.
        flag: the setting of this limit, for messages.
        folder: folder for stack dumps.
        program: name of the command, for messages.
    """

    def __init__(self, limit: float, flag: str, folder: Path, program: str) -> None:
        self.limit, self.flag, self.folder, self.program = limit, flag, folder, program
        # Written by the training thread, read by the watchdog's thread.
        self.step, self.phase, self.training_started = 0, "starting", False
        self._phase_limit, self._phase_start = SLOW_PHASE_FACTOR * self.limit, time.monotonic()
        self._failure: str | None = None  # an error of this rank itself, posted with its heartbeat
        self._alarm: str | None = None  # this rank's reason to raise the alarm
        self._hang: str | None = None  # the diagnosis after an alarm, with the missing ranks
        self._failing = False  # an error is leaving the block
        self._ended = False  # the block was left without an error
        self._launcher = Launcher()
        self._wake = threading.Event()  # ends the thread's pause between heartbeats
        self._reported = threading.Event()  # the thread has posted the error, or printed the diagnosis
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start_phase(self, phase: str, step: int) -> None:
        """Begins `phase` of `step`; phases other than "training" may take `SLOW_PHASE_FACTOR` times as long."""
        # The first step also compiles, tunes kernels and connects communicators.
        factor = 1 if phase == "training" and self.training_started else SLOW_PHASE_FACTOR
        self.training_started = self.training_started or phase == "training"
        self.step, self.phase, self._phase_limit, self._phase_start = step, phase, factor * self.limit, time.monotonic()
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
            # After a diagnosed hang the peers exit. A communication error is then only a consequence, and the
            # diagnosis, which names the missing ranks, is the cause to raise.
            if self._hang is not None and caused_by_peers(error):
                raise TimeoutError(self._hang) from error
        else:
            self._ended = True
            self._wake.set()
            self._thread.join(SILENCE)

    @contextmanager
    def reporting(self) -> Generator[None]:
        """Context manager that reports an error to all ranks at once, before any enclosing block handles it.

        Use it inside of blocks whose exit waits for a thread or for other ranks. If these never answer, the wait would
        otherwise keep the error from being reported. Does nothing outside of the watchdog's block.
        """
        try:
            yield
        except Exception as error:
            if self._thread.is_alive():
                self._report(error)
            raise

    def _report(self, error: Exception) -> None:
        """Posts the first error of this rank, or raises the alarm if missing ranks caused it. The process ends soon."""
        if self._failing:
            return
        failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        self._failing = True
        # Before training starts, the command itself prints refusals, such as an invalid setting.
        if self.training_started or not isinstance(error, REFUSALS) or caused_by_peers(error):
            self._print(f"failed in {self._heartbeat().position}: {failure}")
        if caused_by_peers(error):
            self._alarm = f"in {self._heartbeat().position} another rank does not answer"
        else:
            self._failure = failure
        self._wake.set()
        # Waits until the thread has posted the error, or has gathered the states of all ranks and printed the missing.
        self._reported.wait(4 * SILENCE)

    def _watch(self) -> None:
        """The thread: posts heartbeats until training ends or a rank raises the alarm."""
        try:
            reason = self._wait_for_alarm()
            if reason is not None:
                self._print(*self._diagnose(reason))
        except RuntimeError as error:  # the store does not answer
            self._wait_without_store(error)
        self._reported.set()
        if not self._ended:
            self._end()

    def _wait_without_store(self, error: RuntimeError) -> None:
        """Gives training `GRACE` seconds to end: the process with the store, a launcher or a rank, has ended."""
        end = time.monotonic() + GRACE
        while not (self._ended or self._failing) and time.monotonic() < end:
            self._end_without_launcher()
            time.sleep(0.1)
        if not self._ended:
            self._print(f"the store of the rendezvous is gone: {one_line(str(error))}")

    def _end_without_launcher(self) -> None:
        """Ends the process if its launcher has died: a restart would find it holding the device."""
        if self._launcher.has_exited:
            position, launcher = self._heartbeat().position, self._launcher.pid
            self._print(f"ends in {position}: torchrun (process {launcher}), which started this rank, is gone")
            os._exit(1)

    def _wait_for_alarm(self) -> str | None:
        """Returns the reason of the first alarm of any rank; None when training has ended, or failed on this rank."""
        while not self._ended:
            self._end_without_launcher()
            self._heartbeats.post(self._heartbeat())
            if self._failure is not None:  # posted with the heartbeat above
                return None
            if self._alarm is None and time.monotonic() - self._phase_start > self._phase_limit:
                self._alarm = f"{self._heartbeat().position} takes longer than {self._phase_limit:g} s ({self.flag})"
            # Raises this rank's alarm, or reads one that another rank has raised.
            if (reason := self._heartbeats.alarm(self._alarm)) is not None:
                return reason
            self._wake.wait(min(1.0, self.limit / 20))
            self._wake.clear()
        return None

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self.step, self.phase, failure=self._failure)

    def _diagnose(self, reason: str) -> list[str]:
        """Posts this rank's state, waits for all ranks' states, and returns lines that name the missing ranks."""
        # 1. This rank's state: the line it executes, whether that waits for others, and its collectives so far.
        stack, calls = current_stack(), recorded_calls()
        is_waiting = self._failing or waits(stack) or any(call.running for call in calls.values())
        self._heartbeats.post(
            Heartbeat(self.step, self.phase, location=location_of(stack), waits=is_waiting, calls=calls)
        )
        # 2. Every rank applies the same rules to all states, and names the same missing ranks.
        beats, silent = self._heartbeats.gather()
        missing_lines = [f"missing: rank {rank}: {reason}" for rank, reason in missing_ranks(beats, silent).items()]
        lines = [reason, *(missing_lines or ["no rank is missing: all wait for each other"])]
        if not self._failing:  # a rank that raised an error exits with that error instead
            self._hang = "; ".join(lines)
            record_for_torchrun(self._hang)
        return [*lines, self._write(lines, beats)]

    def _write(self, lines: list[str], beats: dict[int, Heartbeat | None]) -> str:
        """Writes the lines, all heartbeats and the stacks of this process to a file; returns a line that names it."""
        path = self.folder / f"rank-{self._heartbeats.rank}.txt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                file.write("\n".join([*lines, "", *(f"rank {rank}: {beat}" for rank, beat in beats.items()), "", ""]))
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            return f"the stacks of this rank cannot be written to {path}: {error.strerror}"
        return f"stacks of this rank: {path}"

    def _end(self) -> None:
        """Ends a process whose training hangs, or has failed while another thread keeps the process alive."""
        time.sleep(SILENCE / 2)  # training may still raise an error here, because of the same missing rank
        if self._ended:
            return
        if self._failing:
            threading.main_thread().join()
            time.sleep(GRACE)
        with suppress(OSError):
            sys.stdout.flush()
        # `sys.exit` would only end this thread, and could not interrupt a main thread that waits in a collective.
        os._exit(1)

    def _print(self, *lines: str) -> None:
        rank = self._heartbeats.rank
        with suppress(OSError):  # the reader of this process's output may be gone
            sys.stderr.write("".join(f"[rank {rank}] {self.program}: {line}\n" for line in lines))
            sys.stderr.flush()


def record_for_torchrun(reason: str) -> None:
    """Records the reason as torchrun's root cause of the failure."""
    try:
        raise TimeoutError(reason)  # record_exception reads the traceback of the exception that is being handled
    except TimeoutError as error:
        get_error_handler().record_exception(error)


def caused_by_peers(error: Exception) -> bool:
    """Returns True if communication raised the error because another rank is gone or late."""
    if isinstance(error, torch.AcceleratorError):  # a kernel of this rank failed, even if a collective noticed it
        return False
    inside = isinstance(error, RuntimeError) and communicates(traceback.extract_tb(error.__traceback__))
    return inside or isinstance(error, (TimeoutError, dist.DistError))


class Heartbeats:
    """The heartbeats of all ranks, in the store of the process group. Calls raise a RuntimeError if the store is gone.

    Not thread-safe.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        # A clone has its own connection. Training may wait on the default store's connection and lock it meanwhile.
        self._store = dist.PrefixStore("armillary/watchdog", compat.default_store().clone())
        self._store.set_timeout(timedelta(seconds=3 * SILENCE))
        self._count = 0

    def post(self, beat: Heartbeat) -> None:
        """Replaces this rank's heartbeat."""
        self._count += 1  # so that the text changes with every heartbeat
        self._store.set(f"rank-{self.rank}", f"{self._count} {beat.text()}")

    def alarm(self, reason: str | None) -> str | None:
        """Raises the alarm if `reason` is set. Returns the reason of the first alarm on any rank, or None."""
        # `compare_set` stores the reason if the key has no value yet, and returns the stored one: the first alarm wins.
        if reason is not None:
            return self._store.compare_set("alarm", "", reason).decode()
        return self._store.get("alarm").decode() if self._store.check(["alarm"]) else None

    def gather(self) -> tuple[dict[int, Heartbeat | None], set[int]]:
        """Waits until every rank has posted its state or is silent; returns all heartbeats and the silent ranks."""
        posts = dict.fromkeys(range(self.ranks), "")
        # A post counts from when this rank saw it change: clocks of other hosts are not compared.
        since = dict.fromkeys(posts, time.monotonic())
        awaited_ranks, silent, end = set(posts), set[int](), time.monotonic() + 3 * SILENCE
        while awaited_ranks and time.monotonic() < end:
            for rank in sorted(awaited_ranks):
                key, now = f"rank-{rank}", time.monotonic()
                # `get` of a missing key would block until the time-out, hence `check`.
                post = self._store.get(key).decode() if self._store.check([key]) else ""
                if post != posts[rank]:
                    posts[rank], since[rank] = post, now
                if (beat := parse_post(post)) is not None and (beat.location or beat.failure):
                    awaited_ranks.discard(rank)
                elif now - since[rank] > SILENCE:
                    awaited_ranks.discard(rank)
                    silent.add(rank)
            time.sleep(0.05)
        return {rank: parse_post(post) for rank, post in posts.items()}, silent


def parse_post(post: str) -> Heartbeat | None:
    return Heartbeat.parse(post.partition(" ")[2]) if post else None
