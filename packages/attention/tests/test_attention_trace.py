"""Traces of each rank's computation and exchanges in flight: events and their order, not durations."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.attention import AttentionMask
from armillary.core import CommLedger, Trace
from armillary.core.trace import Event
from conformance import Composition

B, N, H, D, P = 2, 64, 4, 8, 4
FULL = AttentionMask(causal=False)
RING, USP = Composition.of("ring-keys", ring=P), Composition.of("usp", ring=2, ulysses=2)


def traced(composition: Composition, path: Path) -> dict[tuple[str, str], int]:
    """Runs forward and backward before, in and after the trace; returns bytes by (axis, phase)."""
    attend = composition.build()
    layout = attend.layout(N)
    q, k, v = (torch.randn(B, N // P, H, D, requires_grad=True) for _ in range(3))

    def both() -> None:
        attend(q, k, v, mask=FULL, layout=layout).sum().backward()

    both()
    with CommLedger() as ledger, Trace() as trace:
        both()
    both()
    trace.write(path)
    keys = [(axis, phase) for axis in ("ring", "ulysses") for phase in ("forward", "backward")]
    return {key: ledger.bytes(axis=key[0], phase=key[1]) for key in keys}


@pytest.fixture(scope="module")
def ring(worlds, tmp_path_factory) -> tuple[list[Event], list[Any]]:
    return read(worlds, RING, tmp_path_factory)


@pytest.fixture(scope="module")
def usp(worlds, tmp_path_factory) -> tuple[list[Event], list[Any]]:
    return read(worlds, USP, tmp_path_factory)


def read(worlds, composition: Composition, folders) -> tuple[list[Event], list[Any]]:
    path = folders.mktemp("trace") / "made" / "trace.json"
    ledgers = worlds(P).run(traced, composition, path)
    return json.loads(path.read_text())["traceEvents"], ledgers


def spans(events: list[Event], rank: int, **attributes: object) -> list[Event]:
    """Returns the spans of a rank with these attributes, such as cat="compute" or axis="ring"."""
    rank_events = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
    return [event for event in rank_events if attributes.items() <= {**event, **event["args"], "args": None}.items()]


def end(event: Event) -> float:
    return event["ts"] + event["dur"]


@pytest.mark.parametrize("method", ["ring", "usp"])
def test_trace_has_all_ranks_and_names_their_lanes(method, request):
    events, _ = request.getfixturevalue(method)
    assert {event["pid"] for event in events} == set(range(P))
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for event in events:
        assert event["ph"] in "MX"
        if event["ph"] == "X":
            lane = names[event["pid"], event["tid"]]
            assert lane.startswith(f"exchange {event['args'].get('axis')}") or lane == "compute"
            assert (event["cat"] == "exchange") == lane.startswith("exchange")
            assert event["ts"] > 0 and event["dur"] >= 0 and event["args"]["phase"] in ("forward", "backward")
    for rank, lane in product(range(P), {event["tid"] for event in events}):  # spans are disjoint or nested
        open_spans: list[Event] = []
        for event in sorted(spans(events, rank, tid=lane), key=lambda event: (event["ts"], -event["dur"])):
            while open_spans and end(open_spans[-1]) <= event["ts"] + 1e-6:
                open_spans.pop()
            assert not open_spans or (end(event) <= end(open_spans[-1]) + 1e-6 and event["cat"] != "exchange")
            open_spans.append(event)


@pytest.mark.parametrize("method", ["ring", "usp"])
def test_the_bytes_in_flight_match_the_ledger(method, request):
    events, ledgers = request.getfixturevalue(method)
    for rank, ledger in enumerate(ledgers):
        for (axis, phase), ledger_bytes in ledger.items():
            actual = spans(events, rank, axis=axis, phase=phase)
            assert sum(event["args"]["bytes"] for event in actual) == ledger_bytes
        assert sum(ledger.values()) > 0


def test_ring_computes_each_block_while_the_next_shard_is_in_flight(ring):
    events, _ = ring
    for rank in range(P):
        for phase in ("forward", "backward"):
            cells = spans(events, rank, cat="compute", phase=phase)
            assert [event["name"] for event in cells] == [f"{phase} q{rank} k{(rank - step) % P}" for step in range(P)]
            moving = spans(events, rank, cat="exchange", phase=phase)
            for cell in cells[:-1]:  # the last block has no exchange
                assert any(event["ts"] <= cell["ts"] and end(cell) <= end(event) for event in moving), cell


def test_waits_end_operations_in_flight(ring):
    events, _ = ring
    for rank in range(P):
        waits = spans(events, rank, cat="wait")
        for moving in spans(events, rank, cat="exchange"):
            assert any(wait["ts"] <= end(moving) <= end(wait) for wait in waits)


def test_concurrent_all_to_alls_have_separate_lanes(usp):
    events, _ = usp
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 0}
    assert {"exchange ulysses", "exchange ulysses (2)", "exchange ulysses (3)"} <= names
