"""What ranks tell each other when a run hangs, and what follows from it: which rank is missing, and where it stands."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from armillary.core import compat


@dataclass(frozen=True)
class Calls:
    """Collectives of a process group that a rank has entered: how many, which came last, and whether one still runs."""

    count: int
    last: str
    running: bool


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of a rank: `step` and `phase` are what it works on.

    The rest is told only when something is wrong: `failure` is how its training failed, `where` the lines of Python at
    which it stands, `waits` whether that is inside of communication, and `calls` its collectives by process group.
    """

    step: int
    phase: str
    failure: str | None = None
    where: str | None = None
    waits: bool = False
    calls: dict[str, Calls] = field(default_factory=dict[str, Calls])

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> Heartbeat:
        fields = json.loads(text)
        fields["calls"] = {group: Calls(**calls) for group, calls in fields["calls"].items()}
        return cls(**fields)

    @property
    def at(self) -> str:
        """Such as "step 7", or "step 7 (saving)"."""
        return f"step {self.step}" + ("" if self.phase == "training" else f" ({self.phase})")


def missing(beats: Mapping[int, Heartbeat | None], silent: set[int]) -> dict[int, str]:
    """The ranks that the others wait for, with what is known of each; none where all wait for each other.

    In this order: ranks that failed, or give no sign of life; ranks that are not in any communication while others
    are; ranks that have entered fewer collectives of a group than those that wait in it.

    Args:
        beats: the last one of each rank; None from a rank that never gave one.
        silent: ranks that give no more heartbeats.
    """
    lost = {rank: beat for rank, beat in beats.items() if rank in silent or beat is None or beat.failure}
    if lost:
        return {rank: _lost(beat) for rank, beat in lost.items()}
    known = {rank: beat for rank, beat in beats.items() if beat is not None}
    elsewhere = {rank: beat for rank, beat in known.items() if not beat.waits}
    if 0 < len(elsewhere) < len(known):
        return {rank: f"in {beat.at}, at {beat.where}" for rank, beat in elsewhere.items()}
    return _behind(known)


def _lost(beat: Heartbeat | None) -> str:
    if beat is None:
        return "has never given a sign of life"
    return f"failed in {beat.at}: {beat.failure}" if beat.failure else f"no sign of life since {beat.at}"


def _behind(beats: Mapping[int, Heartbeat]) -> dict[int, str]:
    """Ranks that have not come to a collective that another rank waits in."""
    found: dict[int, str] = {}
    for group in sorted({group for beat in beats.values() for group in beat.calls}):
        calls = {rank: beat.calls[group] for rank, beat in beats.items() if group in beat.calls}
        most = max(call.count for call in calls.values())
        if not any(call.running and call.count == most for call in calls.values()):
            continue
        for rank, call in calls.items():
            if call.count < most:
                entered = f"has entered {call.count} collectives of group {group!r}, others {most}"
                found.setdefault(rank, f"in {beats[rank].at}, {entered}; at {beats[rank].where}")
    return found


def main_stack() -> traceback.StackSummary:
    """Where the main thread stands, outermost line first."""
    thread = threading.main_thread().ident
    return traceback.extract_stack(sys._current_frames()[thread or 0])  # pyright: ignore[reportPrivateUsage]


def where(stack: traceback.StackSummary) -> str:
    """The innermost line of a stack, and the innermost one outside of torch that led there."""
    inner = stack[-1]
    ours = next((line for line in reversed(stack) if "/torch/" not in line.filename), inner)
    return _line(inner) if ours is inner else f"{_line(inner)}, called by {_line(ours)}"


def waits(stack: traceback.StackSummary) -> bool:
    """Whether a stack ends inside of communication."""
    parts = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")
    ours = ("/armillary/core/exchange.py", "/armillary/core/collective.py")
    return any(line.filename.endswith(parts + ours) for line in stack[-3:])


def _line(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def recorded_calls() -> dict[str, Calls]:
    """This rank's collectives by process group, as torch's flight recorder has them. It knows no sends and receives."""
    found: dict[str, Calls] = {}
    for entry in compat.recorded_collectives():
        group: str = entry["process_group"][0]
        before = found.get(group)
        running: bool = not entry["retired"] or (before is not None and before.running)
        if not entry["is_p2p"]:
            found[group] = Calls(entry["collective_seq_id"], entry["profiling_name"], running)
    return found
