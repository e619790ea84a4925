"""A thread that detects a hung run, names the missing ranks and ends the process.

A rank that waits in a collective cannot be interrupted. So each rank has a thread that posts heartbeats in the store of
the rendezvous, and raises an alarm when a step takes too long. After an alarm, the thread of every live rank posts the
rank's state, reports the missing ranks (dead or hung: the others wait for them), and ends the process.
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
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist

from armillary.data.console import (
    EXPLAINED,
    PEER_ERRORS,
    is_out_of_memory,
    needs_no_traceback,
    one_line,
    report_failure,
    write_to_stderr,
)
from armillary.train.hang_diagnosis import (
    SILENCE,
    Heartbeat,
    Heartbeats,
    communicates,
    current_stack,
    location_of,
    recorded_calls,
    waits,
)

# Factor on the time-out of a step, for the first step and for phases other than training.
SLOW_PHASE_FACTOR = 5

# Seconds for which the process continues after the main thread has failed, or after the store is gone.
GRACE = 20.0


class Watchdog:
    """Context manager that ends a hung run: detects missing ranks, dumps their stacks and exits.

    If a phase takes too long on any rank (`start_phase`), every live rank reports the missing ranks, writes the stacks
    of all its threads to `folder`/rank-N.txt and ends its process with exit code 1. An error that leaves the block is
    reported with rank and step, or with the missing ranks if communication raised it. Outside of a `with` block no
    thread runs.

    Args:
        limit: seconds that a step of training may take.
        flag: the flag that sets `limit`, with its value, for messages.
    """

    def __init__(self, limit: float, flag: str, folder: Path, program: str) -> None:
        self.limit, self.flag, self.folder, self.program = limit, flag, folder, program
        # The training thread writes these fields, the watchdog's thread reads them.
        self.step, self.phase, self.training_started = 0, "starting", False
        self.explained = False  # True once the failure has been reported so that a traceback would add nothing
        self._phase_limit, self._phase_start = SLOW_PHASE_FACTOR * self.limit, time.monotonic()
        self._failure: str | None = None  # error that this rank itself caused; its heartbeat carries it
        self._alarm: str | None = None  # this rank's reason to raise the alarm
        self._hang: str | None = None  # diagnosis after an alarm, with the missing ranks
        self._peer_error: Exception | None = None  # error of communication, which is no cause if ranks are missing
        self._failing = False  # True once an error is leaving the block
        self._ended = False  # True once the block was left without an error
        # The process of torchrun that started this one. When it dies, this process gets another parent.
        # PR_SET_PDEATHSIG does not work here: the kernel sends its signal already when the parent's *thread* ends.
        self._launcher = os.getppid() if dist.is_torchelastic_launched() else None
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._report(error)
            # After an alarm the peers exit, which makes communication fail here. The cause to raise is the diagnosis,
            # which names the missing ranks.
            if self._hang is not None and caused_by_peers(error):
                raise TimeoutError(self._hang) from error
        else:
            self._ended = True
            self._wake.set()
            self._thread.join(SILENCE)

    @contextmanager
    def reporting(self) -> Generator[None]:
        """Reports an error to all ranks before the exits of enclosing blocks run.

        Use it inside of a block whose exit waits for a thread or for other ranks: without it, the error would be
        reported only after that wait, which may never end. Does nothing if the watchdog's thread is not running.
        """
        try:
            yield
        except Exception as error:
            if self._thread.is_alive():
                self._report(error)
            raise

    def _report(self, error: Exception) -> None:
        """Posts the first error of this rank, or raises the alarm if other ranks caused it. Ignores later ones."""
        # Only the first rank of each torchrun prints a cause (`report_failure`).
        if self._failing:
            return
        self._failing = True
        failed, message = f"failed in {self._heartbeat().position}", (str(error).splitlines() or [""])[0]
        if caused_by_peers(error):
            self._peer_error = error
            self._alarm = f"{failed}: {type(error).__name__}: {message}"
        else:
            # The command reports errors that refuse a run before training starts, such as an invalid setting.
            if isinstance(error, EXPLAINED) and self.training_started:
                self._report_failure(f"{failed}: {type(error).__name__}: {error}")
            elif self.training_started or not needs_no_traceback(error):
                self._report_failure(failed, error=error)
            self._failure = f"{type(error).__name__}: {message}"
        self._wake.set()
        # Waits until the thread has posted the error, or has reported the missing ranks.
        self._reported.wait(4 * SILENCE)

    def _watch(self) -> None:
        # In a thread: heartbeats until training ends or a rank raises the alarm, which ends a hung process.
        try:
            while not self._ended:
                self._end_without_launcher()
                # 1. Post a heartbeat. If this rank has failed, the other ranks learn of it from this heartbeat.
                beat = self._heartbeat()
                self._heartbeats.post(beat)
                if beat.failure is not None:
                    break
                # 2. Raise this rank's alarm, or read one that another rank has raised.
                if self._alarm is None and time.monotonic() - self._phase_start > self._phase_limit:
                    self._alarm = f"{beat.position} takes longer than {self._phase_limit:g} s ({self.flag})"
                if (reason := self._heartbeats.alarm(self._alarm)) is not None:
                    self._diagnose(reason)
                    break
                self._wake.wait(min(1.0, self.limit / 20))
                self._wake.clear()
        except RuntimeError as error:
            # The store does not answer: the process that hosted it, a launcher or a rank, is gone. Training gets
            # `GRACE` seconds to end.
            end = time.monotonic() + GRACE
            while not (self._ended or self._failing) and time.monotonic() < end:
                self._end_without_launcher()
                time.sleep(0.1)
            if not self._ended:
                gone = f"the store of the rendezvous is gone: {one_line(str(error))}"
                self._report_failure(*filter(None, [self._alarm]), gone, caused_by_peers=True)
        self._reported.set()
        if not self._ended:
            self._end()

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self.step, self.phase, failure=self._failure)

    def _end_without_launcher(self) -> None:
        # This rank would still use the device when the run is restarted.
        if self._launcher not in (None, os.getppid()):
            rank, position = self._heartbeats.rank, self._heartbeat().position
            reason = f"ends in {position}: torchrun (process {self._launcher}), which started this rank, is gone"
            write_to_stderr(f"[rank {rank}] {self.program}: {reason}\n")
            os._exit(1)

    def _diagnose(self, reason: str) -> None:
        """Posts this rank's state, waits for all ranks' states, and reports the missing ranks."""
        # 1. This rank's state: the line that the main thread executes, whether it waits, and the operations so far.
        stack, calls = current_stack(), recorded_calls()
        is_waiting = self._failing or waits(stack) or any(call.running for call in calls.values())
        self._heartbeats.post(
            Heartbeat(self.step, self.phase, location=location_of(stack), waits=is_waiting, calls=calls)
        )
        # 2. Every rank names the same missing ranks.
        beats, missing = self._heartbeats.diagnose()
        missing_lines = [f"missing: rank {rank}: {reason}" for rank, reason in missing.items()]
        lines = missing_lines or ["no rank is missing: all wait for each other"]
        if not self._failing:  # a rank that is raising an error exits with that error instead
            self._hang = "; ".join([reason, *lines])
        # 3. The lines, all heartbeats and the stacks of this process, in a file.
        path = self.folder / f"rank-{self._heartbeats.rank}.txt"
        stacks = f"stacks of the ranks: {self.folder}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                states = [f"rank {rank}: {beat}" for rank, beat in beats.items()]
                file.write("\n".join([reason, *lines, "", *states, "", ""]))
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            stacks = f"the stacks of this rank cannot be written to {path}: {error.strerror}"
        # 4. The cause comes last. Without a missing rank the cause may be this rank's error.
        if missing_lines or self._peer_error is None:
            self._report_failure(reason, stacks, *lines, caused_by_peers=True)
        else:
            self._report_failure(stacks, *lines, f"failed in {self._heartbeat().position}", error=self._peer_error)

    def _report_failure(self, *lines: str, error: Exception | None = None, caused_by_peers: bool = False) -> None:
        """Reports the cause, which is the last line or completed by `error`; see `report_failure`."""
        # All ranks were well when the phase began. A second earlier, because torchrun compares whole seconds.
        begin = time.time() - (time.monotonic() - self._phase_start) - 1 if caused_by_peers else None
        recorded = report_failure(
            self.program, *lines, error=error, rank=self._heartbeats.rank, caused_by_peers=caused_by_peers, begin=begin
        )
        self.explained = recorded or error is None

    def _end(self) -> None:
        """Ends the process if training hangs, or if it has failed and another thread keeps the process alive."""
        # Training may still raise an error here because of the same missing rank, and exit by itself.
        time.sleep(SILENCE / 2)
        if self._ended:
            return
        if self._failing:
            # The main thread handles the error, and other threads, such as one that saves, get time to end.
            threading.main_thread().join()
            time.sleep(GRACE)
        with suppress(OSError):
            sys.stdout.flush()
        # `sys.exit` would end only this thread; a main thread that waits in a collective cannot be interrupted.
        os._exit(1)


def caused_by_peers(error: Exception) -> bool:
    """Returns True if communication raised the error because another rank is gone or late."""
    # A collective may also raise the error of a failed kernel of this rank, or run out of memory itself.
    if isinstance(error, torch.AcceleratorError) or is_out_of_memory(error):
        return False
    in_communication = isinstance(error, RuntimeError) and communicates(traceback.extract_tb(error.__traceback__))
    return in_communication or isinstance(error, (*PEER_ERRORS, dist.DistError))
