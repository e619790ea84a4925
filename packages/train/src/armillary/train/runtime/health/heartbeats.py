"""Heartbeats, by which ranks report their states, and the rules that find the missing ranks of a hung run.

torch's flight recorder tells which operations a rank has started. It is read by private functions of torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from armillary.core.parts import compat

SILENCE = 6.0
"""Seconds without a heartbeat after which a rank counts as dead."""


@dataclass(frozen=True)
class Calls:
    """Operations that a rank has started in one process group so far.

    Args:
        count: number of collectives. Ranks that wait in the same collective have the same number.
        last: name of the latest operation.
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
        step: the step that the rank works on.
        phase: phase of the step, such as "training" or "saving".
        failure: error that ended the rank's training.
        location: text with the line that the rank executes.
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
        """Step and phase, such as "step 7" or "step 7 (saving)"."""
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
        """Replaces this rank's heartbeat."""
        self._count += 1
        self._store.set(f"rank-{self.rank}", HEARTBEATS.dump_json(replace(beat, number=self._count)).decode())

    def alarm(self, reason: str | None) -> str | None:
        """Raises the alarm if `reason` is set. Returns the reason of the first alarm on any rank, or None."""
        # `compare_set` stores the reason if the key has no value yet, and returns the stored one: the first alarm wins.
        if reason is not None:
            return self._store.compare_set("alarm", "", reason).decode()
        return self._store.get("alarm").decode() if self._store.check(["alarm"]) else None

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


def missing_ranks(beats: Mapping[int, Heartbeat | None], silent: set[int]) -> dict[int, str]:
    """Returns the ranks that the others wait for, each with the reason; an empty dict if all wait for each other.

    Applies the first of these rules that finds ranks: 1. ranks that failed or stopped posting heartbeats; 2. ranks
    that do not wait, while others do; 3. ranks that have started fewer collectives of a group than a rank that waits
    in it.

    Args:
        beats: the last heartbeat of each rank; None for a rank without any.
        silent: ranks that have stopped posting heartbeats.
    """
    # 1. Lost ranks.
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
    alive = {rank: beat for rank, beat in beats.items() if beat is not None}
    busy = {rank: beat for rank, beat in alive.items() if not beat.waits}
    if 0 < len(busy) < len(alive):
        return {rank: f"in {beat.position}, at {beat.location}" for rank, beat in busy.items()}
    # 3. All ranks wait, or none does. A rank that skipped a collective has started fewer than the others.
    for group in sorted({group for beat in alive.values() for group in beat.calls}):
        calls = {rank: beat.calls[group] for rank, beat in alive.items() if group in beat.calls}
        highest = max(call.count for call in calls.values())
        if not any(call.running and call.count == highest for call in calls.values()):
            continue  # no rank waits in the latest collective of this group
        for rank, call in calls.items():
            if call.count < highest:
                entered_text = f"has entered {call.count} collectives of group {group}, others {highest}"
                reasons.setdefault(rank, f"in {alive[rank].position}, {entered_text}; at {alive[rank].location}")
    return reasons


def recorded_calls() -> dict[str, Calls]:
    """Returns this rank's operations by process group and backend, from torch's flight recorders.

    The recorders keep only the latest operations, but number all of them. gloo does not record sends and receives. NCCL
    records the sends and receives of a batch as completed, even while the batch is running.
    """
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

    Operations of one process group and backend are in the order of their calls. Some keys of an entry: process_group
    (name, description); profiling_name, such as "nccl2:all_reduce"; collective_seq_id and p2p_seq_id, the group's
    numbers of collectives and of sends and receives so far; retired, True if the operation has completed.
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
    """Returns the names of the backends of all process groups. torch 2.15 has one flight recorder for each name.

    A name is that of the backend's class: "nccl2" for a group that was created with "nccl".
    """
    groups: list[Any] = list(cast(Any, dist.distributed_c10d)._world.pg_map)
    return sorted({group._get_backend(device).name() for group in groups for device in group._device_types})
