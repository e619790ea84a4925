"""What ranks tell each other when a run hangs, and what follows from it: which rank is missing, and where it stands."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

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
    """Where the main thread stands, outermost line first; or the thread for whose end it waits, as when saving."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame = frames[threading.main_thread().ident or 0]
    while (awaited := joined(frame)) is not None and awaited.ident in frames:
        frame = frames[awaited.ident]
    return traceback.extract_stack(frame)


def joined(frame: FrameType | None) -> threading.Thread | None:
    """The thread for whose end a thread waits that stands in this frame, if it does."""
    while frame is not None and in_standard_library(frame.f_code.co_filename):
        awaited = frame.f_locals.get("self")
        if frame.f_code.co_name == "join" and isinstance(awaited, threading.Thread):
            return awaited
        frame = frame.f_back
    return None


STANDARD = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}, "<frozen ")


def in_standard_library(file: str) -> bool:
    """Whether it is a file of Python's own: a line there says that something is waited for, and not what."""
    return file.startswith(STANDARD) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def where(stack: traceback.StackSummary) -> str:
    """The innermost line of a stack outside of the standard library, and the innermost one that is outside of torch."""
    lines = [line for line in stack if not in_standard_library(line.filename)] or list(stack)
    inner = lines[-1]
    ours = next((line for line in reversed(lines) if "/torch/" not in line.filename), inner)
    return _line(inner) if ours is inner else f"{_line(inner)}, called by {_line(ours)}"


COMMUNICATION = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/_functional_collectives.py",
    "/armillary/core/collectives/exchange.py",
    "/armillary/core/collectives/collective.py",
)
CALLED_THERE = re.compile("/torch/|/armillary/core/|/armillary/train/runtime/")
"""An op of torch is several functions below a wait, and `compat` or a backend below an exchange."""


def waits(stack: traceback.StackSummary) -> bool:
    """Whether a stack ends in communication, or in what it calls: of torch, of this package, of Python itself."""
    for line in reversed(stack):
        if line.filename.endswith(COMMUNICATION):
            return True
        if not (CALLED_THERE.search(line.filename) or in_standard_library(line.filename)):
            return False
    return False


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
