"""Heartbeats: the state of a rank as the other ranks see it, and which rank of a hung run is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from armillary.core import compat


@dataclass(frozen=True)
class Calls:
    """Operations that a rank has started in one process group.

    Args:
        count: collectives. Ranks that wait for each other have started equally many.
        last: name of the latest operation.
        running: an operation has not completed.
        messages: number of sends and receives, which may differ between ranks.
    """

    count: int
    last: str
    running: bool
    messages: int = 0


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of a rank. The fields after `phase` are set only once something is wrong.

    Args:
        step: that the rank works on.
        phase: phase of the step, such as "training" or "saving".
        failure: error that ended its training.
        location: innermost lines of its Python stack.
        waits: it is in a collective, or waits for its device.
        calls: latest call by process group and backend.
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
        fields = json.loads(text)
        fields["calls"] = {group: Calls(**calls) for group, calls in fields["calls"].items()}
        return cls(**fields)

    @property
    def position(self) -> str:
        """Such as "step 7", or "step 7 (saving)"."""
        return f"step {self.step}" + ("" if self.phase == "training" else f" ({self.phase})")


def missing_ranks(beats: Mapping[int, Heartbeat | None], silent: set[int]) -> dict[int, str]:
    """Returns the ranks that the others wait for, each with the reason; none if all wait for each other.

    The first rule that applies names them: ranks that failed or give no more heartbeats; ranks that do not wait while
    others do; ranks that have started fewer collectives of a group than a rank that waits in it.

    Args:
        beats: the last heartbeat of each rank; None from a rank that never gave one.
        silent: ranks that give no more heartbeats.
    """
    lost_ranks = {rank: beat for rank, beat in beats.items() if rank in silent or beat is None or beat.failure}
    if lost_ranks:
        return {rank: reason_of_loss(beat) for rank, beat in lost_ranks.items()}
    alive = {rank: beat for rank, beat in beats.items() if beat is not None}
    busy = {rank: beat for rank, beat in alive.items() if not beat.waits}
    if 0 < len(busy) < len(alive):
        return {rank: f"in {beat.position}, at {beat.location}" for rank, beat in busy.items()}
    return ranks_behind(alive)


def reason_of_loss(beat: Heartbeat | None) -> str:
    if beat is None:
        return "has never given a sign of life"
    return f"failed in {beat.position}: {beat.failure}" if beat.failure else f"no sign of life since {beat.position}"


def ranks_behind(beats: Mapping[int, Heartbeat]) -> dict[int, str]:
    """Returns the ranks that have not started a collective in which another rank waits, each with the reason."""
    reasons: dict[int, str] = {}
    for group in sorted({group for beat in beats.values() for group in beat.calls}):
        calls = {rank: beat.calls[group] for rank, beat in beats.items() if group in beat.calls}
        highest = max(call.count for call in calls.values())
        if not any(call.running and call.count == highest for call in calls.values()):
            continue
        for rank, call in calls.items():
            if call.count < highest:
                entered_text = f"has entered {call.count} collectives of group {group}, others {highest}"
                reasons.setdefault(rank, f"in {beats[rank].position}, {entered_text}; at {beats[rank].location}")
    return reasons


def recorded_calls() -> dict[str, Calls]:
    """Returns this rank's operations by process group and backend, as torch's flight recorders have them.

    The recorders keep the latest operations only, but count all of them. gloo records no sends and receives; of NCCL's
    batched ones only the batch can still be running, and that is not recorded.
    """
    calls: dict[str, Calls] = {}
    for entry in compat.recorded_collectives():
        operation: str = entry["profiling_name"]
        group = f"{entry['process_group'][0]} ({operation.partition(':')[0]})"
        earlier = calls.get(group)
        is_running: bool = not entry["retired"] or (earlier is not None and earlier.running)
        calls[group] = Calls(entry["collective_seq_id"], operation, is_running, entry["p2p_seq_id"])
    return calls
