"""The picture of what each rank computes and what is under way: what it shows, and in which order. No durations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.attention import AttentionMask
from armillary.core import CommLedger, Trace
from armillary.core.observe.trace import Event
from conformance import Composition

B, N, H, D, P = 2, 64, 4, 8, 4
FULL = AttentionMask(causal=False)
RING, USP = Composition.of("ring-keys", ring=P), Composition.of("usp", ring=2, ulysses=2)


def traced(composition: Composition, path: Path) -> dict[tuple[str, str], int]:
    """Attends once, forward and backward, before the trace, in it and after it; bytes by (axis, phase)."""
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


def spans(events: list[Event], rank: int, **facts: object) -> list[Event]:
    """Those of a rank that have these facts, such as cat="compute" or axis="ring"."""
    here = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
    return [event for event in here if facts.items() <= {**event, **event["args"], "args": None}.items()]


def end(event: Event) -> float:
    return event["ts"] + event["dur"]


@pytest.mark.parametrize("made", ["ring", "usp"])
def test_every_rank_is_there_and_its_lanes_have_names(made, request):
    events, _ = request.getfixturevalue(made)
    assert {event["pid"] for event in events} == set(range(P))
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for event in events:
        assert event["ph"] in "MX"
        if event["ph"] == "X":
            lane = names[event["pid"], event["tid"]]
            assert lane.startswith(f"exchange {event['args'].get('axis')}") or lane == "compute"
            assert (event["cat"] == "exchange") == lane.startswith("exchange")
            assert event["ts"] > 0 and event["dur"] >= 0 and event["args"]["phase"] in ("forward", "backward")


@pytest.mark.parametrize("made", ["ring", "usp"])
def test_spans_of_a_lane_are_one_after_another_or_one_within_another(made, request):
    events, _ = request.getfixturevalue(made)
    for rank in range(P):
        for lane in {event["tid"] for event in events}:
            held: list[Event] = []
            for event in sorted(spans(events, rank, tid=lane), key=lambda event: (event["ts"], -event["dur"])):
                while held and end(held[-1]) <= event["ts"] + 1e-6:
                    held.pop()
                assert not held or (end(event) <= end(held[-1]) + 1e-6 and event["cat"] != "exchange")
                held.append(event)


@pytest.mark.parametrize("made", ["ring", "usp"])
def test_the_bytes_in_flight_match_the_ledger(made, request):
    events, ledgers = request.getfixturevalue(made)
    for rank, ledger in enumerate(ledgers):
        for (axis, phase), sent in ledger.items():
            actual = spans(events, rank, axis=axis, phase=phase)
            assert sum(event["args"]["bytes"] for event in actual) == sent
        assert sum(ledger.values()) > 0


def test_a_ring_computes_each_cell_while_the_next_is_under_way(ring):
    events, _ = ring
    for rank in range(P):
        for phase in ("forward", "backward"):
            cells = spans(events, rank, cat="compute", phase=phase)
            assert [event["name"] for event in cells] == [f"{phase} q{rank} k{(rank - step) % P}" for step in range(P)]
            moving = spans(events, rank, cat="exchange", phase=phase)
            for cell in cells[:-1]:  # nothing comes after the last
                assert any(event["ts"] <= cell["ts"] and end(cell) <= end(event) for event in moving), cell


def test_waits_end_operations_in_flight(ring):
    events, _ = ring
    for rank in range(P):
        waits = spans(events, rank, cat="wait")
        for moving in spans(events, rank, cat="exchange"):
            assert any(wait["ts"] <= end(moving) <= end(wait) for wait in waits)


def test_all_to_alls_that_are_under_way_together_have_lanes_of_their_own(usp):
    events, _ = usp
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 0}
    assert {"exchange ulysses", "exchange ulysses (2)", "exchange ulysses (3)"} <= names
