"""Traces and labels of computations and messages.

    trace    `Trace` records computation and communication of every rank on one time line, in Chrome's trace format
    label    `label` names a computation in profiles, traces and memory accounts

A primitive calls `record` just before it sends: open ledgers and the open trace both learn of the messages there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
import torch.distributed as dist

from armillary.core import compat
from armillary.core.files import writing
from armillary.core.ledger import CommLedger, current_phase

COMPUTE = "compute"
"""The lane of computation. Communication has the lanes "exchange ring", "exchange ulysses", ..."""

Event = dict[str, Any]
"""An entry of "traceEvents"."""


class HostClock:
    def __init__(self) -> None:
        self.origin: int = self.now()

    def now(self) -> int:
        return time.perf_counter_ns()

    def microseconds(self, instant: int) -> float:
        return (instant - self.origin) / 1000


class CudaClock:
    """Instants are CUDA events on the current stream. The host waits for the device at the start and to read times."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self.origin: torch.cuda.Event = self.now()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def microseconds(self, instant: torch.cuda.Event) -> float:
        instant.synchronize()
        return self.origin.elapsed_time(instant) * 1000


Clock = HostClock | CudaClock
"""Clocks of traces. Recording an instant makes neither the host nor the device wait."""


@dataclass
class TraceSpan:
    """A time span on a lane, in Chrome's category "compute", "wait", "label" or "exchange", until it is finished."""

    clock: Clock
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
    "exchange <axis>" have the messages of all primitives of `armillary.core`, with bytes, kind, axis and phase; a
    message may have arrived before the end of its span, which is that of `wait`.

    All ranks must open a trace for the first time together, because their clocks start at a barrier. A closed trace may
    be opened again, and continues. Of a graph of torch.compile a trace shows only the ops of Armillary.

    Args:
        device: "cpu" records times of the host. "cuda" records times of the current stream by CUDA events, and waits
            for the device only when the trace is first opened and when it is written.

    Raises:
        ValueError: another trace is open when the `with` block is entered.
    """

    device: str = "cpu"
    spans: list[TraceSpan] = field(default_factory=list[TraceSpan])
    clock: Clock | None = None

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
        # Only now are instants read as times, for which the host may wait. A trace that was never opened has no clock.
        clock, ended_spans = self.clock, [span for span in self.spans if span.end is not None]
        in_microseconds = [(clock.microseconds(x.start), clock.microseconds(x.end), x) for x in ended_spans if clock]
        for number, (lane, timed) in enumerate(_lanes(in_microseconds)):
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


Timed = tuple[float, float, TraceSpan]
"""(start, end, span), in microseconds."""


def _lanes(timed: Sequence[Timed]) -> list[tuple[str, list[Timed]]]:
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
    """Records messages in open ledgers just before a primitive sends them. Returns their span in the open trace."""
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
    work: dist.Work
    span: TraceSpan

    def wait(self, *timeout: Any) -> bool:
        completed = self.work.wait(*timeout)
        self.span.finish()
        return completed

    def is_completed(self) -> bool:
        return self.work.is_completed()


# -- labels -----------------------------------------------------------------------------------------------------------


class Label(NamedTuple):
    """The name of a computation. `host` is True if the tensors that it allocates are in host memory."""

    name: str
    host: bool = False


_current: ContextVar[Label | None] = ContextVar("label", default=None)


@contextmanager
def label(name: str, *, host: bool = False) -> Generator[None]:
    """Context manager that labels the computations of this thread. Of nested labels the innermost counts.

    The label appears in a torch profile, in a `Trace` and in memory accounts. The backward pass of a labelled
    computation has no label; a function that implements a backward can label it there.

    Args:
        name: the label, such as "attention" or "mlp".
        host: True if new tensors are in host memory, as those of offloaded checkpoints are. A memory simulation cannot
            see that, because all of its tensors are on the CPU.
    """
    if torch.compiler.is_compiling():
        yield
        return
    token = _current.set(Label(name, host))
    try:
        profiled = torch.profiler.record_function(name) if compat.profiling() else nullcontext()
        with profiled, span(name, "label"):
            yield
    finally:
        _current.reset(token)


def current_label() -> Label | None:
    return _current.get()
