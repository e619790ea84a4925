"""The next shard is in flight while a step computes, and returning results have a separate communicator.

The order proves it, not time: every rank records the starts of exchanges, waits and kernels.
"""

import pytest
import torch
import torch.distributed as dist

from armillary.attention import AttentionMask, Ring, TokenRing, Ulysses, WallFacer
from armillary.attention.tiling.block_attention import BlockAttention
from armillary.core.collectives import exchange
from armillary.core.testing import mesh

P, TOKENS = 4, 8
FULL = AttentionMask(causal=False)


class Recorder:
    """Events of this rank in order: ("start", exchange), ("kernel", n), ("wait", exchange).

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
        """Wraps a method of a block to record one event if it calls kernels."""

        def run(block, *tensors):
            if block.calls:
                self.events.append(("kernel", self.next("kernel")))
            return original(block, *tensors)

        return run


class RecordedWork:
    """A `Work` that records its wait."""

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
    """Returns the events of forward and of backward."""
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


METHODS = ["ring keys", "ring queries", "token_ring", "wallfacer keys", "wallfacer queries"]
MASKS = {"full": FULL, "causal": AttentionMask(), "window": AttentionMask(window=(3, None))}


def all_recorded() -> dict[tuple[str, str], tuple[list[tuple[str, str]], list[tuple[str, str]]]]:
    return {(name, kind): recorded(name, mask) for name in METHODS for kind, mask in MASKS.items()}


def goes_back(name: str, phase: int) -> bool:
    return phase == 1 or name == "token_ring"


def test_exchanges_are_in_flight_while_a_step_computes(worlds):
    for rank in worlds(P).run(all_recorded):
        for (name, kind), phases in rank.items():
            for phase, events in enumerate(phases):
                started, waited = ({event for what, event in events if what == side} for side in ("start", "wait"))
                assert started == waited, (name, kind)
                if kind == "full":
                    check_order(events, goes_back(name, phase))


def check_order(events: list[tuple[str, str]], with_returns: bool) -> None:
    at = {event: index for index, event in enumerate(events)}
    assert sum(kind == "kernel" for kind, _ in events) == P
    assert sum(kind == "start" and name.startswith("on") for kind, name in events) == P - 1, events
    assert sum(kind == "start" and name.startswith("back") for kind, name in events) == (P - 1) * with_returns, events
    for step in range(P - 1):  # the next shard is in flight during a kernel
        started, waited = at["start", f"on {step}"], at["wait", f"on {step}"]
        assert started < at["kernel", f"kernel {step}"] < waited < at["kernel", f"kernel {step + 1}"], events
    for step in range(1, P - 1) if with_returns else ():  # results are sent after their step; the wait follows the next
        started, waited = at["start", f"back {step - 1}"], at["wait", f"back {step - 1}"]
        assert at["kernel", f"kernel {step}"] < started < at["kernel", f"kernel {step + 1}"] < waited, events


def all_to_all_events(ranks: int) -> list[str]:
    """Returns the order of starts and waits of all-to-alls in Ulysses' forward."""
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


def test_ulysses_has_q_k_and_v_in_flight_at_once(worlds):
    for events in worlds(2).run(all_to_all_events, 2):
        assert events == ["start"] * 3 + ["wait"] * 3 + ["start", "wait"]
