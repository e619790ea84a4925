"""Traces: `Trace` records computation and communication of every rank on one time line, in Chrome's trace format.

`span` records a computation, `record` the messages of a communication primitive.
"""

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
"""The lane of computation. Communication has the lanes "exchange ring", "exchange ulysses", ..."""

Event = dict[str, Any]
"""An entry of "traceEvents"."""


@dataclass
class TraceSpan:
    """A time span on a lane of a trace. It ends at the end of its `with` block, or when `finish` is called.

    Args:
        clock: the clock that read `start` and `end`.
        category: Chrome's category: "compute", "wait", "label" or "exchange".
        arguments: shown by the viewer with the span.
        start, end: instants of `clock`; `end` is None while the span is open.
    """

    clock: Clock[Any]
    lane: str
    name: str
    category: str
    arguments: dict[str, Any]
    start: Any
    end: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Ends the span. Later calls have no effect."""
        if self.end is None:
            self.end = self.clock.now()


@dataclass
class Trace:
    """Context manager that records when this process computes and when its messages are in flight.

        with Trace() as trace:
            attend(q, k, v, mask=mask, layout=layout).backward(dout)
        trace.write(Path("trace.json"))  # on every rank; open it in ui.perfetto.dev or chrome://tracing

    The viewer shows each rank as a process. Its lane "compute" has blocks of attention, the labels around them, and a
    span "wait ..." while computation waits for a message: communication that is not overlapped. Its lanes
    "exchange <axis>" have the messages of all primitives of `armillary.core`, with bytes, kind, axis and phase. A
    message's span lasts from its start to the end of `wait`, although the message may have arrived earlier. Concurrent
    exchanges of an axis are on separate lanes.

    All ranks must open a trace for the first time together: their clocks start at a barrier, and differ by as much as
    the times at which the ranks leave the barrier. A closed trace may be opened again, and continues. Of a graph of
    torch.compile a trace shows only the ops of Armillary.

    Args:
        device: "cpu" records times of the host. "cuda" records times of the current stream by CUDA events, and waits
            for the device only when the trace is first opened and when it is written. The span of an exchange is then
            from the point of the stream where the exchange was started to the point where the stream has waited for it.

    Raises:
        ValueError: another trace is open when the `with` block is entered.
    """

    device: str = "cpu"
    spans: list[TraceSpan] = field(default_factory=list[TraceSpan])
    clock: Clock[Any] | None = None

    current: ClassVar[Trace | None] = None
    """The open trace of this process."""

    def __enter__(self) -> Self:
        if Trace.current is not None:
            raise ValueError("another trace is open; close it first, or use that one")
        if self.clock is None:
            for _ in range(2 if dist.is_initialized() else 0):  # ranks leave a first barrier late: it may connect them
                dist.barrier()
            self.clock = CudaClock() if self.device == "cuda" else HostClock()
        Trace.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Trace.current = None

    def begin(self, lane: str, name: str, category: str, arguments: dict[str, Any]) -> TraceSpan:
        """Starts a span on a lane."""
        assert self.clock is not None
        arguments = {**arguments, "phase": current_phase()}
        span = TraceSpan(self.clock, lane, name, category, arguments, self.clock.now())
        self.spans.append(span)
        return span

    def events(self) -> list[Event]:
        """Returns the "traceEvents" of this rank: all spans that have ended, with times in microseconds."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        events = [
            _meta(rank, "process_name", 0, name=f"rank {rank}"),
            _meta(rank, "process_sort_index", 0, sort_index=rank),
        ]
        for number, (lane, timed) in enumerate(_lanes(self._spans_in_microseconds())):
            events.append(_meta(rank, "thread_name", number, name=lane))
            events.append(_meta(rank, "thread_sort_index", number, sort_index=number))
            events += [
                {"ph": "X", "pid": rank, "tid": number, "ts": start, "dur": end - start}
                | {"name": span.name, "cat": span.category, "args": span.arguments}
                for start, end, span in timed
            ]
        return events

    def write(self, path: Path) -> None:
        """Writes one file with the events of all ranks, on rank 0. Every rank must call it.

        Raises:
            OSError: on rank 0, if the file cannot be written.
        """
        events = self.events()
        events_by_rank = [events]
        if dist.is_initialized():
            events_by_rank = [events] * dist.get_world_size()  # a list of the right length for `gather_object` to fill
            dist.gather_object(events, events_by_rank if dist.get_rank() == 0 else None)
            if dist.get_rank() != 0:
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path):
            path.write_text(json.dumps({"traceEvents": sum(events_by_rank, list[Event]()), "displayTimeUnit": "ms"}))

    def _spans_in_microseconds(self) -> list[Timed]:
        clock = self.clock
        if clock is None:  # never opened
            return []
        ended_spans = [span for span in self.spans if span.end is not None]
        return [(clock.microseconds(span.start), clock.microseconds(span.end), span) for span in ended_spans]


Timed = tuple[float, float, TraceSpan]
"""(start, end, span), in microseconds."""


def _lanes(timed: Sequence[Timed]) -> list[tuple[str, list[Timed]]]:
    """Returns (name, spans) of each lane: the lane of computation, then those of exchanges."""
    # Chrome can draw overlapping spans in one lane only if they are nested. Computations are nested. An exchange that
    # overlaps the last exchange of its lane goes to the next free lane of its axis.
    lanes: dict[tuple[str, int], list[Timed]] = {(COMPUTE, 1): []}
    for timed_span in sorted(timed, key=lambda timed_span: timed_span[:2]):
        start, _, span = timed_span
        name, number = span.lane, 1
        while name != COMPUTE and (name, number) in lanes and lanes[name, number][-1][1] > start:
            number += 1
        lanes.setdefault((name, number), []).append(timed_span)
    order = sorted(lanes, key=lambda lane: (lane[0] != COMPUTE, lane))
    return [(name if number == 1 else f"{name} ({number})", lanes[name, number]) for name, number in order]


def _meta(rank: int, event: str, thread: int, **arguments: object) -> Event:
    """Returns an event that sets the name or the sort index of a rank (a process to Chrome) or a lane (a thread)."""
    return {"ph": "M", "pid": rank, "tid": thread, "name": event, "args": arguments}


def span(name: str, category: str = COMPUTE, **arguments: object) -> AbstractContextManager[object]:
    """Context manager that records a computation of this rank in the open trace; does nothing without one."""
    trace = Trace.current
    if trace is None or torch.compiler.is_compiling():
        return nullcontext()
    return trace.begin(COMPUTE, name, category, arguments)


NO_SPAN: AbstractContextManager[None] = nullcontext()
"""A context that records nothing. Code on the hot path uses it instead of calling `span` when no trace is open."""


def record(axis: str, kind: str, nbytes: int, messages: int) -> TraceSpan | None:
    """Records messages to other ranks in open ledgers and the trace, just before a primitive sends them.

    Returns:
        The span of the messages, which `end_span_on_wait` ends; None without an open trace.
    """
    if CommLedger.opened:
        CommLedger.add(axis, kind, nbytes, messages)
    if Trace.current is None:
        return None
    return Trace.current.begin(f"exchange {axis}", kind, "exchange", {"axis": axis, "kind": kind, "bytes": nbytes})


def end_span_on_wait(works: Sequence[dist.Work], span: TraceSpan | None) -> tuple[dist.Work, ...]:
    """Returns `works`, the last one wrapped so that its `wait` ends the span."""
    if span is None or not works:
        return tuple(works)
    return (*works[:-1], cast(dist.Work, TracedWork(works[-1], span)))


@dataclass(frozen=True)
class TracedWork:
    """A work of torch.distributed whose `wait` ends a span."""

    work: dist.Work
    span: TraceSpan

    def wait(self, *timeout: Any) -> bool:
        completed = self.work.wait(*timeout)
        self.span.finish()
        return completed
