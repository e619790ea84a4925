"""Diagnosis of a hung run: the states that its ranks post, and the rules that find the missing ranks.

A rank posts heartbeats (`Heartbeats`). After an alarm it posts its state: the line that its main thread executes
(`current_stack`), whether it waits for others (`waits`), and the operations that it has started, from torch's flight
recorders (`recorded_calls`), which are read by private functions of torch. `missing_ranks` compares the states of all.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from armillary.core.internal import compat

# Seconds without a heartbeat after which a rank counts as dead.
SILENCE = 6.0


@dataclass(frozen=True)
class Calls:
    """Operations that a rank has started in one process group so far.

    Args:
        count: number of collectives. Ranks that wait in the same collective have the same number.
        running: True if an operation has not completed.
        messages: number of sends and receives, which may differ between ranks.
    """

    count: int
    last: str
    running: bool
    messages: int = 0


@dataclass(frozen=True)
class Heartbeat:
    """The state of a rank. The fields after `phase` are set only after a failure or an alarm.

    Args:
        waits: True if the rank is in a collective, or waits for its device.
        calls: operations so far, by process group and backend.
        number: number of heartbeats that the rank has posted, so that each of them differs.
    """

    step: int
    phase: str
    failure: str | None = None
    location: str | None = None
    waits: bool = False
    calls: dict[str, Calls] = field(default_factory=dict[str, Calls])
    number: int = 0

    @property
    def position(self) -> str:
        return f"step {self.step}" + ("" if self.phase == "training" else f" ({self.phase})")


HEARTBEATS = TypeAdapter(Heartbeat)


class Heartbeats:
    """The heartbeats of all ranks, in the store of the process group. Methods raise RuntimeError if the store is gone.

    Not thread-safe.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        # A clone has a connection of its own: a training thread that waits on the store locks the default connection.
        self._store = dist.PrefixStore("armillary/watchdog", compat.default_store().clone())
        self._store.set_timeout(timedelta(seconds=3 * SILENCE))
        self._count = 0

    def post(self, beat: Heartbeat) -> None:
        self._count += 1
        self._store.set(f"rank-{self.rank}", HEARTBEATS.dump_json(replace(beat, number=self._count)).decode())

    def alarm(self, reason: str | None) -> str | None:
        """Raises the alarm if `reason` is set. Returns the reason of the first alarm on any rank, or None."""
        # `compare_set` stores the reason if the key has no value yet, and returns the stored one: the first alarm wins.
        if reason is not None:
            return self._store.compare_set("alarm", "", reason).decode()
        return self._store.get("alarm").decode() if self._store.check(["alarm"]) else None

    def diagnose(self) -> tuple[dict[int, Heartbeat | None], dict[int, str]]:
        """Waits for the states of all ranks; returns their heartbeats and the missing ranks, each with the reason.

        The missing ranks are those that the first diagnosis of any rank found. A rank that was stopped and wakes later
        finds the states of ranks that have ended since, by which no rank would be missing.
        """
        beats, silent = self.gather()
        own_diagnosis = json.dumps(missing_ranks(beats, silent))
        first_diagnosis = json.loads(self._store.compare_set("missing", "", own_diagnosis))
        return beats, {int(rank): reason for rank, reason in first_diagnosis.items()}

    def gather(self) -> tuple[dict[int, Heartbeat | None], set[int]]:
        """Waits up to `3 * SILENCE` for each rank to post its state; returns all heartbeats and the silent ranks."""
        beats: dict[int, Heartbeat | None] = dict.fromkeys(range(self.ranks))
        # When this rank last saw a heartbeat change. Heartbeats carry no time, because clocks of hosts differ.
        last_change = dict.fromkeys(beats, time.monotonic())
        awaited_ranks, silent, end = set(beats), set[int](), time.monotonic() + 3 * SILENCE
        while awaited_ranks and time.monotonic() < end:
            for rank in sorted(awaited_ranks):
                key, now = f"rank-{rank}", time.monotonic()
                # `get` of a missing key would block until the time-out, hence `check`.
                beat = HEARTBEATS.validate_json(self._store.get(key)) if self._store.check([key]) else None
                if beat != beats[rank]:
                    beats[rank], last_change[rank] = beat, now
                if beat is not None and (beat.location or beat.failure):
                    awaited_ranks.discard(rank)
                elif now - last_change[rank] > SILENCE:
                    awaited_ranks.discard(rank)
                    silent.add(rank)
            time.sleep(0.05)
        return beats, silent


# -- the missing ranks ------------------------------------------------------------------------------------------------


def missing_ranks(beats: Mapping[int, Heartbeat | None], silent: set[int]) -> dict[int, str]:
    """Returns the ranks that the others wait for, each with the reason; an empty dict if all wait for each other.

    Args:
        beats: the last heartbeat of each rank; None for a rank without any.
        silent: ranks that have stopped posting heartbeats.
    """
    # The first of these rules that finds ranks applies.
    # 1. Lost ranks: they failed, or stopped posting heartbeats.
    reasons: dict[int, str] = {}
    for rank, beat in beats.items():
        if beat is None:
            reasons[rank] = "has never posted a heartbeat"
        elif beat.failure:
            reasons[rank] = f"failed in {beat.position}: {beat.failure}"
        elif rank in silent:
            reasons[rank] = f"no heartbeat since {beat.position}"
    if reasons:
        return reasons
    # 2. Ranks that still compute, or read a file: the others wait for them.
    live_beats = {rank: beat for rank, beat in beats.items() if beat is not None}
    busy_beats = {rank: beat for rank, beat in live_beats.items() if not beat.waits}
    if 0 < len(busy_beats) < len(live_beats):
        return {rank: f"in {beat.position}, at {beat.location}" for rank, beat in busy_beats.items()}
    # 3. All ranks wait, or none does. A rank that skipped a collective has started fewer than the others.
    for group in sorted({group for beat in live_beats.values() for group in beat.calls}):
        calls = {rank: beat.calls[group] for rank, beat in live_beats.items() if group in beat.calls}
        highest = max(call.count for call in calls.values())
        if not any(call.running and call.count == highest for call in calls.values()):
            continue  # no rank waits in the latest collective of this group
        for rank, call in calls.items():
            if call.count < highest:
                entered_text = f"has entered {call.count} collectives of group {group}, others {highest}"
                beat = live_beats[rank]
                reasons.setdefault(rank, f"in {beat.position}, {entered_text}; at {beat.location}")
    return reasons


# -- torch's flight recorders -----------------------------------------------------------------------------------------


def recorded_calls() -> dict[str, Calls]:
    """Returns this rank's operations by process group and backend, from torch's flight recorders."""
    # The recorders keep only the latest operations, but number all of them. gloo does not record sends and receives.
    # NCCL records those of a batch as completed, even while the batch is running.
    calls: dict[str, Calls] = {}
    for entry in recorded_collectives():
        operation: str = entry["profiling_name"]
        group = f"{entry['process_group'][0]} ({operation.partition(':')[0]})"
        earlier = calls.get(group)
        is_running: bool = not entry["retired"] or (earlier is not None and earlier.running)
        calls[group] = Calls(entry["collective_seq_id"], operation, is_running, entry["p2p_seq_id"])
    return calls


def recorded_collectives() -> list[dict[str, Any]]:
    """Returns the latest collectives, sends and receives of this process from torch's flight recorders.

    Operations of one process group and backend are in the order of their calls. Keys of an entry: process_group (name,
    description); profiling_name, such as "nccl2:all_reduce"; collective_seq_id and p2p_seq_id, the group's numbers so
    far; retired, True if the operation has completed.
    """
    private: Any = cast(Any, torch)._C._distributed_c10d
    options = {"includeCollectives": True, "onlyActive": False}
    dumps: list[bytes] = []
    if (dump := getattr(private, "_dump_fr_trace_json", None)) is not None:
        try:
            dumps = [dump(**options, backend=backend) for backend in backend_names()]
        except TypeError:  # before torch 2.15 this function takes no backend: it dumps gloo's recorder
            dumps = [dump(**options)]
    if (dump := getattr(private, "_dump_nccl_trace_json", None)) is not None:
        dumps.append(dump(**options))  # ProcessGroupNCCL has a recorder of its own
    return [entry for dump in dumps for entry in json.loads(dump).get("entries", [])]


def backend_names() -> list[str]:
    # torch 2.15 has a flight recorder for each backend, by the name of its class: "nccl2" for a group of "nccl".
    groups: list[Any] = list(cast(Any, dist.distributed_c10d)._world.pg_map)
    return sorted({group._get_backend(device).name() for group in groups for device in group._device_types})


# -- the Python stack of a rank that may hang -------------------------------------------------------------------------


STANDARD_LIBRARY = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}, "<frozen ")

PACKAGES = "/armillary/"

# Files whose functions communicate.
COMMUNICATION = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/_functional_collectives.py",
    "/armillary/core/collectives/exchange.py",
    "/armillary/core/collectives/collective.py",
)

# Matches files whose functions communication may call: torch's ops, `compat`, backends written in Python.
CALLED_BY_COMMUNICATION = re.compile("/torch/|/armillary/core/")

# Matches calls of torch in which the host waits for the device, and so for collectives that run there.
BLOCKING_READS = re.compile(r"\b(item|tolist|cpu|numpy|(_cuda_)?synchronize|_accelerator_synchronizeDevice)\(")


def current_stack() -> StackSummary:
    """Returns the stack of the main thread, or of the thread that the main thread waits for, outermost line first."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame = frames.pop(threading.main_thread().ident or 0)
    # The main thread may join a thread, for example one that saves a checkpoint, or wait for autograd's device thread,
    # which runs the backward pass on CUDA.
    while (ident := awaited_thread(frame, frames)) is not None:
        frame = frames.pop(ident)
    # Source lines are looked up when they are needed, since a file system that hangs would block the lookup.
    stack = StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    stack.reverse()
    return stack


def awaited_thread(frame: FrameType, frames: dict[int, FrameType]) -> int | None:
    """Returns the id of the thread that the thread of this innermost frame waits for, or None."""
    if (thread := joined_thread(frame)) is not None:
        return thread.ident if thread.ident in frames else None
    if frame.f_code.co_name != "_engine_run_backward":
        return None
    # Autograd's threads are started by C++. `threading` has a dummy thread for them, or none.
    dummy = threading._DummyThread  # pyright: ignore[reportPrivateUsage]
    python_threads = {thread.ident for thread in threading.enumerate() if not isinstance(thread, dummy)}
    autograd = [ident for ident in frames if ident not in python_threads]

    def runs_packages(ident: int) -> bool:
        return any(PACKAGES in caller.f_code.co_filename for caller, _ in traceback.walk_stack(frames[ident]))

    # Autograd has a thread for each device. The one that runs code of our packages is in the middle of backward.
    return max(autograd, key=runs_packages, default=None)


def joined_thread(frame: FrameType | None) -> threading.Thread | None:
    """Returns the thread that `frame` waits for in `Thread.join`, which may have called other functions; or None."""
    while frame is not None and in_standard_library(frame.f_code.co_filename):
        thread = frame.f_locals.get("self")
        if frame.f_code.co_name == "join" and isinstance(thread, threading.Thread):
            return thread
        frame = frame.f_back
    return None


def location_of(stack: StackSummary) -> str:
    """Returns the innermost line outside of the standard library, and the line that called torch, if any, as text."""
    lines = [line for line in stack if not in_standard_library(line.filename)] or list(stack)
    inner = lines[-1]
    caller = next((line for line in reversed(lines) if "/torch/" not in line.filename), inner)
    inner_text, caller_text = (f"{Path(line.filename).name}:{line.lineno} in {line.name}" for line in (inner, caller))
    return inner_text if caller is inner else f"{inner_text}, called by {caller_text}"


def waits(stack: StackSummary) -> bool:
    """Returns True if a stack ends in communication, or on a line in which the host waits for the device."""
    # These calls have no frame of their own. If such a line blocks elsewhere, `missing_ranks` counts collectives.
    return communicates(stack) or any(BLOCKING_READS.search(line.line or "") for line in innermost(stack))


def communicates(stack: StackSummary) -> bool:
    # The stack ends in a function that communicates, or in functions that such a function calls.
    return any(line.filename.endswith(COMMUNICATION) for line in innermost(stack))


def innermost(stack: StackSummary) -> list[FrameSummary]:
    """Returns the innermost lines of a stack, innermost first, through the first one that communication never calls."""
    lines: list[FrameSummary] = []
    for line in reversed(stack):
        lines.append(line)
        if not (CALLED_BY_COMMUNICATION.search(line.filename) or in_standard_library(line.filename)):
            break
    return lines


def in_standard_library(file: str) -> bool:
    # Lines of the standard library show that a thread waits, but not why. Installed packages lie in its folder.
    return file.startswith(STANDARD_LIBRARY) and not {"site-packages", "dist-packages"} & set(Path(file).parts)
