"""Heartbeats, by which ranks report their states, and the rules that find the missing ranks of a hung run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from pydantic import TypeAdapter

from armillary.train.runtime.flight_recorder import recorded_collectives


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
    """

    step: int
    phase: str
    failure: str | None = None
    location: str | None = None
    waits: bool = False
    calls: dict[str, Calls] = field(default_factory=dict[str, Calls])

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str | bytes) -> Heartbeat:
        return HEARTBEATS.validate_json(text)

    @property
    def position(self) -> str:
        """Step and phase, such as "step 7" or "step 7 (saving)"."""
        return f"step {self.step}" + ("" if self.phase == "training" else f" ({self.phase})")


HEARTBEATS = TypeAdapter(Heartbeat)


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
    lost_ranks = {rank: beat for rank, beat in beats.items() if rank in silent or beat is None or beat.failure}
    if lost_ranks:
        return {rank: reason_of_loss(beat) for rank, beat in lost_ranks.items()}
    # 2. Ranks that still compute, or read a file: the others wait for them.
    alive = {rank: beat for rank, beat in beats.items() if beat is not None}
    busy = {rank: beat for rank, beat in alive.items() if not beat.waits}
    if 0 < len(busy) < len(alive):
        return {rank: f"in {beat.position}, at {beat.location}" for rank, beat in busy.items()}
    # 3. All ranks wait, or none does. A rank that skipped a collective has started fewer than the others.
    return ranks_behind(alive)


def reason_of_loss(beat: Heartbeat | None) -> str:
    if beat is None:
        return "has never posted a heartbeat"
    return f"failed in {beat.position}: {beat.failure}" if beat.failure else f"no heartbeat since {beat.position}"


def ranks_behind(beats: Mapping[int, Heartbeat]) -> dict[int, str]:
    """Returns the ranks that have not started a collective in which another rank waits, each with the reason."""
    reasons: dict[int, str] = {}
    for group in sorted({group for beat in beats.values() for group in beat.calls}):
        calls = {rank: beat.calls[group] for rank, beat in beats.items() if group in beat.calls}
        highest = max(call.count for call in calls.values())
        if not any(call.running and call.count == highest for call in calls.values()):
            continue  # no rank waits in the latest collective of this group
        for rank, call in calls.items():
            if call.count < highest:
                entered_text = f"has entered {call.count} collectives of group {group}, others {highest}"
                reasons.setdefault(rank, f"in {beats[rank].position}, {entered_text}; at {beats[rank].location}")
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
