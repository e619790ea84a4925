"""The next shard is on its way while a tile is computed, and what goes back has a communicator of its own.

Proven by order, not by time: on every rank, what starts, what is waited for and which kernels run is written down.
"""

import pytest
import torch
import torch.distributed as dist

from armillary.attention import AttentionMask, Ring, TokenRing, Ulysses, WallFacer
from armillary.attention.tiling.block import BlockAttention
from armillary.core import FlatBuffer
from armillary.core.collectives import exchange
from armillary.core.testing import mesh

P, TOKENS = 4, 8
FULL = AttentionMask(causal=False)


class Recorder:
    """What happens on this rank, in order: ("start", exchange), ("kernel", n), ("wait", exchange).

    Exchanges are named "on 0", "on 1", .. and "back 0", .. by their communicator; kernels are counted by step.
    """

    def __init__(self, forward_group: dist.ProcessGroup) -> None:
        self.group = forward_group
        self.events: list[tuple[str, str]] = []
        self.counts = {"on": 0, "back": 0, "kernel": 0}

    def next(self, kind: str) -> str:
        self.counts[kind] += 1
        return f"{kind} {self.counts[kind] - 1}"

    def batch(self, original):
        def started(group, receive, send):
            if not receive and not send:
                return []
            name = self.next("on" if group is self.group else "back")
            self.events.append(("start", name))
            return [RecordedWork(work, name, self.events) for work in original(group, receive, send)]

        return started

    def computed(self, original):
        """A method of a block, written down where it calls kernels: once, however many."""

        def run(block, *tensors):
            if block.calls:
                self.events.append(("kernel", self.next("kernel")))
            return original(block, *tensors)

        return run


class RecordedWork:
    """A `Work` that says when it was waited for."""

    def __init__(self, work, name: str, events: list[tuple[str, str]]) -> None:
        self.work, self.name, self.events = work, name, events

    def wait(self, *timeout):
        if ("wait", self.name) not in self.events:
            self.events.append(("wait", self.name))
        return self.work.wait(*timeout)


def build(name: str, ranks: int = P):
    axis = mesh(ring=ranks)["ring"]
    if name.startswith("wallfacer"):
        return WallFacer(axis, team=1, backward=name.removeprefix("wallfacer "))
    return TokenRing(axis) if name == "token_ring" else Ring(axis, backward=name.removeprefix("ring "))


def recorded(name: str, mask: AttentionMask = FULL) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Events of forward and of backward."""
    attend = build(name)
    layout = attend.layout(P * TOKENS, "contiguous")
    q, k, v = (torch.randn(2, TOKENS, 4, 8, requires_grad=True) for _ in range(3))
    recorder = Recorder(attend.axis.group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange.compat, "start_batch", recorder.batch(exchange.compat.start_batch))
        for name in ("forward", "backward"):
            patch.setattr(BlockAttention, name, recorder.computed(getattr(BlockAttention, name)))
        out = attend(q, k, v, mask=mask, layout=layout)
        forward, recorder.events[:] = list(recorder.events), []
        recorder.counts |= dict.fromkeys(recorder.counts, 0)
        out.sum().backward()
    return forward, list(recorder.events)


def ring_of(attend):
    """The method that has the ring: WallFacer has one among teams."""
    return attend.team_ring if isinstance(attend, WallFacer) else attend


METHODS = ["ring keys", "ring queries", "token_ring", "wallfacer keys", "wallfacer queries"]
MASKS = {"full": FULL, "causal": AttentionMask(), "window": AttentionMask(window=(3, None))}


def all_recorded() -> dict[tuple[str, str], tuple[list[tuple[str, str]], list[tuple[str, str]]]]:
    return {(name, kind): recorded(name, mask) for name in METHODS for kind, mask in MASKS.items()}


@pytest.fixture(scope="module")
def ranks(worlds):
    """What each rank wrote down of each method under each mask."""
    return worlds(P).run(all_recorded)


@pytest.mark.parametrize("name", METHODS)
def test_the_next_shard_is_under_way_while_a_step_is_computed(ranks, name):
    for events in (events for rank in ranks for events in rank[name, "full"]):
        at = {event: index for index, event in enumerate(events)}
        assert sum(kind == "kernel" for kind, _ in events) == P
        assert sum(kind == "start" and what.startswith("on") for kind, what in events) == P - 1, events
        for step in range(P - 1):
            started, waited = at["start", f"on {step}"], at["wait", f"on {step}"]
            assert started < at["kernel", f"kernel {step}"] < waited < at["kernel", f"kernel {step + 1}"], events


def goes_back(name: str, phase: str) -> bool:
    return phase == "backward" or name == "token_ring"


@pytest.mark.parametrize(
    ("name", "phase"),
    [(name, phase) for name in METHODS for phase in ("forward", "backward") if goes_back(name, phase)],
)
def test_returning_results_overlap_with_the_next_step(ranks, name, phase):
    for rank in ranks:
        events = rank[name, "full"][phase == "backward"]
        at = {event: index for index, event in enumerate(events)}
        returns = [what for kind, what in events if kind == "start" and what.startswith("back")]
        assert len(returns) == P - 1, events
        for step in range(1, P - 1):  # what step computed is sent right after, and waited for after the next kernel
            started, waited = at["start", f"back {step - 1}"], at["wait", f"back {step - 1}"]
            assert at["kernel", f"kernel {step}"] < started < at["kernel", f"kernel {step + 1}"] < waited, events


def test_all_that_is_started_is_waited_for(ranks):
    for rank in ranks:
        for method_name, phases in rank.items():
            for events in phases:
                started, waited = ({what for kind, what in events if kind == side} for side in ("start", "wait"))
                assert started == waited, method_name


def communicators() -> list[tuple[bool, list[int], list[int]]]:
    groups = [(attend.axis.group, attend.return_axis.group) for attend in map(ring_of, map(build, METHODS))]
    return [(on is back, dist.get_process_group_ranks(on), dist.get_process_group_ranks(back)) for on, back in groups]


def test_the_two_directions_have_communicators_of_their_own(worlds):
    for actual in worlds(P).run(communicators):
        for same, ranks, back in actual:
            assert not same and ranks == back == list(range(P))


def both_directions() -> list[str]:
    """Sent on the way back first and received last, a message is still not taken for one that goes on."""
    attend, rank = Ring(mesh(ring=2)["ring"]), dist.get_rank()
    other = 1 - rank
    boxes = {name: FlatBuffer.like([torch.empty(1)]) for name in ("on", "back")}
    back_going, on_going = (FlatBuffer.of([torch.full((1,), tens + rank)]) for tens in (10.0, 20.0))
    back = exchange.start_exchange(attend.return_axis, {other: back_going}, {other: boxes["back"]})
    on = exchange.start_exchange(attend.axis, {other: on_going}, {other: boxes["on"]})
    on.wait()
    back.wait()
    return [f"{name} {int(box.tensors[0])}" for name, box in boxes.items()]


def test_messages_of_the_two_directions_are_not_mixed_up(worlds):
    assert worlds(2).run(both_directions) == [["on 21", "back 11"], ["on 20", "back 10"]]


def heads_move(ranks: int) -> list[str]:
    """The order of exchanges and waits of one all-to-all call of Ulysses' forward."""
    events: list[str] = []
    attend = Ulysses(mesh(ulysses=ranks)["ulysses"])
    original = dist.all_to_all_single

    def started(*arguments, **named):
        events.append("start")
        return RecordedAll(original(*arguments, **named), events)

    q, k, v = (torch.randn(1, TOKENS, 4, 8) for _ in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", started)
        attend(q, k, v, mask=FULL, layout=attend.layout(ranks * TOKENS, "contiguous"))
    return events


class RecordedAll:
    def __init__(self, work, events: list[str]) -> None:
        self.work, self.events = work, events

    def wait(self, *timeout):
        self.events.append("wait")
        return self.work.wait(*timeout)


def test_ulysses_has_q_k_and_v_under_way_at_once(worlds):
    for events in worlds(2).run(heads_move, 2):
        assert events == ["start"] * 3 + ["wait"] * 3 + ["start", "wait"]
