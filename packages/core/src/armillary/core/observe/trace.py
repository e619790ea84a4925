"""What each rank computes and what is under way meanwhile, side by side: a picture in Chrome's trace format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
import torch.distributed as dist

from armillary.core.files import writing
from armillary.core.observe.clock import Clock, CudaClock, HostClock
from armillary.core.observe.ledger import CommLedger, current_phase

COMPUTE = "compute"
"""The lane of what the rank itself does. What is under way has lanes "exchange ring", "exchange ulysses", ..."""

Event = dict[str, Any]
"""One of "traceEvents"."""


@dataclass
class TraceSpan:
    """Something that goes on for a while; a context manager, or call `finish`."""

    clock: Clock[Any]
    lane: str
    name: str
    category: str
    facts: dict[str, Any]
    start: Any
    end: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """It ends now. The first call counts."""
        if self.end is None:
            self.end = self.clock.now()


@dataclass
class Trace:
    """While it is open, takes down when this process computes and when what it sends and receives is under way.

        with Trace() as trace:
            attend(q, k, v, mask=mask, layout=layout).backward(dout)
        trace.write(Path("trace.json"))  # on every rank; open it in ui.perfetto.dev or chrome://tracing

    Each rank is a process of the picture. Its lane "compute" has the cells of attention, the labels around them, and
    "wait": where computation stands still until something has arrived. Its lanes "exchange <axis>" have all that the
    primitives of `armillary.core` send and receive, with bytes, kind, axis and phase: from the start until whoever
    started it has waited for it. It may have been complete before: what was not hidden behind computation is the wait.
    Exchanges of an axis that are under way together have lanes of their own.

    All ranks must open it together for the first time: their clocks start at a barrier, and differ by as much as they
    leave it apart. Opened again, it goes on. With nothing open, nothing is taken down. Inside torch.compile's graphs
    only our own ops are seen, which run as they are.

    Args:
        device: "cpu": instants are the host's. "cuda": those of the current stream, by CUDA events, without waiting for
            the device until the trace is written. An exchange then starts where the stream was when it was started, and
            ends when the stream goes on after it.
    """

    device: str = "cpu"
    spans: list[TraceSpan] = field(default_factory=list[TraceSpan])
    clock: Clock[Any] | None = None

    current: ClassVar[Trace | None] = None

    def __enter__(self) -> Self:
        if Trace.current is not None:
            raise ValueError("another trace is open; close it first, or use that one")
        if self.clock is None:
            for _ in range(2 if dist.is_initialized() else 0):  # the first may have to connect ranks
                dist.barrier()
            self.clock = CudaClock() if self.device == "cuda" else HostClock()
        Trace.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Trace.current = None

    def begin(self, lane: str, name: str, category: str, facts: dict[str, Any]) -> TraceSpan:
        assert self.clock is not None
        facts = {**facts, "phase": current_phase()}
        span = TraceSpan(self.clock, lane, name, category, facts, self.clock.now())
        self.spans.append(span)
        return span

    def events(self) -> list[Event]:
        """This rank's part of "traceEvents", of all that has ended: times in microseconds."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        found = [
            _meta(rank, "process_name", 0, name=f"rank {rank}"),
            _meta(rank, "process_sort_index", 0, sort_index=rank),
        ]
        for number, (lane, timed) in enumerate(_lanes(self._timed())):
            found.append(_meta(rank, "thread_name", number, name=lane))
            found.append(_meta(rank, "thread_sort_index", number, sort_index=number))
            found += [
                {"ph": "X", "pid": rank, "tid": number, "ts": start, "dur": end - start}
                | {"name": span.name, "cat": span.category, "args": span.facts}
                for start, end, span in timed
            ]
        return found

    def write(self, path: Path) -> None:
        """Writes one file of all ranks' events, on rank 0. Every rank must call it.

        Raises:
            OSError: on rank 0, a file that cannot be written.
        """
        mine = self.events()
        every = [mine]
        if dist.is_initialized():
            every = [mine] * dist.get_world_size()
            dist.gather_object(mine, every if dist.get_rank() == 0 else None)
            if dist.get_rank() != 0:
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path):
            path.write_text(json.dumps({"traceEvents": sum(every, list[Event]()), "displayTimeUnit": "ms"}))

    def _timed(self) -> list[Timed]:
        clock = self.clock
        if clock is None:
            return []
        ended = [span for span in self.spans if span.end is not None]
        return [(clock.microseconds(span.start), clock.microseconds(span.end), span) for span in ended]


Timed = tuple[float, float, TraceSpan]
"""(start, end, span), in microseconds."""


def _lanes(timed: Sequence[Timed]) -> list[tuple[str, list[Timed]]]:
    """Lanes with their spans: that of what is computed first, then exchanges, no two of which overlap in one lane."""
    lanes: dict[tuple[str, int], list[Timed]] = {(COMPUTE, 1): []}
    for each in sorted(timed, key=lambda each: each[:2]):
        name, number = each[2].lane, 1
        while name != COMPUTE and (name, number) in lanes and lanes[name, number][-1][1] > each[0]:
            number += 1
        lanes.setdefault((name, number), []).append(each)
    order = sorted(lanes, key=lambda lane: (lane[0] != COMPUTE, lane))
    return [(name if number == 1 else f"{name} ({number})", lanes[name, number]) for name, number in order]


def _meta(rank: int, what: str, thread: int, **facts: object) -> Event:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": facts}


def span(name: str, category: str = COMPUTE, **facts: object) -> AbstractContextManager[object]:
    """Around something that this rank computes: shows it in the trace that is open, if one is."""
    trace = Trace.current
    if trace is None or torch.compiler.is_compiling():
        return nullcontext()
    return trace.begin(COMPUTE, name, category, facts)


IDLE: AbstractContextManager[None] = nullcontext()
"""In the place of a `span` whose name nobody would read, where no trace is open: what calls all the time asks first."""


def record(axis: str, kind: str, sent: int, messages: int) -> TraceSpan | None:
    """Called by each primitive just before it starts to send so many bytes, in so many messages, to other ranks.

    Returns:
        where a trace is open, what `watched` is to be given.
    """
    if CommLedger.opened:
        CommLedger.add(axis, kind, sent, messages)
    if Trace.current is None:
        return None
    return Trace.current.begin(f"exchange {axis}", kind, "exchange", {"axis": axis, "kind": kind, "bytes": sent})


def watched(works: Sequence[dist.Work], under_way: TraceSpan | None) -> tuple[dist.Work, ...]:
    """The works that have been started, whose span ends when the last of them has been waited for."""
    if under_way is None or not works:
        return tuple(works)
    return (*works[:-1], cast(dist.Work, WatchedWork(works[-1], under_way)))


@dataclass(frozen=True)
class WatchedWork:
    """A work that ends a span when it has been waited for."""

    work: dist.Work
    under_way: TraceSpan

    def wait(self, *timeout: Any) -> bool:
        done = self.work.wait(*timeout)
        self.under_way.finish()
        return done
