"""Traces without ranks, and the lanes of spans. The attention package tests the traces of methods."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from armillary.core import Axis, FlatBuffer, Trace, label, span, start_all_gather, start_exchange
from armillary.core.testing import mesh
from armillary.core.trace import end_span_on_wait, record


class LateWork:
    def wait(self) -> bool:
        return True


def lanes(trace: Trace) -> list[str]:
    return [event["args"]["name"] for event in trace.events() if event["name"] == "thread_name"]


def shown(trace: Trace) -> list[tuple[str, str]]:
    return [(event["name"], event["cat"]) for event in trace.events() if event["ph"] == "X"]


def test_labels_and_spans_are_shown_while_a_trace_is_open(tmp_path: Path):
    with span("before"), Trace() as trace, label("attention"), span("cell", query=1):
        assert not [event for event in trace.events() if event["ph"] == "X"]  # no span has ended
    with span("between"):
        assert Trace.current is None
    with trace, span("again"):
        pass
    assert shown(trace) == [("attention", "label"), ("cell", "compute"), ("again", "compute")]
    with trace, pytest.raises(ValueError, match="another trace is open"), Trace():
        pass
    assert Trace.current is None and Trace().events()
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == trace.events()
    assert [event["args"] for event in events if event["ph"] == "X"][1] == {"query": 1, "phase": "forward"}


def test_concurrent_exchanges_have_separate_lanes():
    work = LateWork()
    assert end_span_on_wait([work], record("ring", "p2p", 1, 1)) == (work,)  # unchanged without a trace
    with Trace() as trace:
        works = [end_span_on_wait([LateWork()], record("ring", "p2p", size, 1)) for size in (1, 2)]
        works[0][0].wait()
        works.append(end_span_on_wait([LateWork()], record("ring", "p2p", 3, 1)))
        for work in works:
            work[0].wait()
        record("tp", "p2p", 9, 1)  # without a wait, so not in the trace
    assert lanes(trace) == ["compute", "exchange ring", "exchange ring (2)"]
    placed = {event["args"]["bytes"]: event["tid"] for event in trace.events() if event["ph"] == "X"}
    assert placed == {1: 1, 2: 2, 3: 1}


def exchanged() -> list[tuple[str, str]]:
    axis = Axis.of(mesh(ring=2)["ring"])
    flat, other = FlatBuffer.of([torch.ones(3)]), FlatBuffer.like([torch.ones(3)])
    with Trace() as trace:
        start_exchange(axis, {1 - axis.rank: flat}, {1 - axis.rank: other}).wait()
        start_exchange(axis, {}, {}).wait()
        start_all_gather(torch.ones(1, 2), axis, (2, 2)).wait()
        dist.barrier()
    return shown(trace)


def test_primitives_show_messages_in_flight_and_waits(worlds):
    expected = [("wait ring", "wait"), ("wait ring", "wait"), ("p2p", "exchange"), ("all_gather", "exchange")]
    assert worlds(2).run(exchanged) == [expected] * 2
