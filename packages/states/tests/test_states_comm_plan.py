"""Plans of layers with a state and of relayouts, compared with every rank's ledger to the byte."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from states_oracle import each
from test_states import KINDS, inputs_of, layer_of, local_inputs

from armillary.attention import AttentionMask
from armillary.core import Axis, CommLedger, SequenceLayout, relayout, short_convolution
from armillary.core.testing import mesh
from armillary.states import halo_comm_plan, relayout_comm_plan, state_comm_plan

LENGTH = 48
LAYOUTS = {
    "contiguous": SequenceLayout.contiguous(LENGTH, 4),
    "zigzag": SequenceLayout.zigzag(LENGTH, 4),
    "uneven": SequenceLayout([[range(5), range(20, 30)], [range(5, 14)], [range(14, 20)], [range(30, 48)]]),
}
MASKS = {
    "none": None,
    "documents": AttentionMask(documents=[0, 13, 24, LENGTH]),
    "rows": AttentionMask(documents=[[0, LENGTH], [0, 13, 24, LENGTH]]),
    "tree": AttentionMask.tree([0, 20, 33, 40, LENGTH], [-1, 0, 0, 2]),
}


def phases_of(ledger: CommLedger) -> list[int]:
    return [ledger.bytes(phase=phase) for phase in ("forward", "backward")]


def layer_bytes(kind: str, layout: SequenceLayout, mask: AttentionMask | None) -> list[int]:
    """Returns the bytes of a layer's forward and backward, with float64 states and 2 rows."""
    ring = mesh(ring=4)["ring"]
    tensors = local_inputs(inputs_of(kind, layout.length), layout, Axis.of(ring).rank)
    local = {name: x.requires_grad_() for name, x in tensors.items()}
    with CommLedger() as ledger:
        out, _ = layer_of(kind)(**local, layout=layout, axis=ring, mask=mask)
        torch.autograd.grad(out.sum(), list(local.values()))
    gathered, reduced = ledger.bytes(kind="all_gather", phase="forward"), ledger.bytes(kind="reduce_scatter")
    assert phases_of(ledger) == [gathered, reduced]
    return [gathered, reduced]


def expected_bytes(kind: str, layout: SequenceLayout, ends: list[int]) -> list[list[int]]:
    """Bytes of float64 states of two rows of documents, one per run that another rank continues or that ends a row."""
    heads, channels, width = 4, 6, 5
    elements = []
    spans = {
        (run.start, run.stop): shard
        for shard in range(layout.shards)
        for start, stop in pairwise(ends)
        for span in layout.spans(shard)
        if (run := range(max(span.start, start), min(span.stop, stop)))
    }
    by_start, by_stop = ({span[i]: shard for span, shard in spans.items()} for i in (0, 1))
    for rank in range(layout.shards):
        total = 0
        for start, stop in (span for span, shard in spans.items() if shard == rank):
            follows = stop not in ends and by_start[stop] != rank
            tree_start = start
            while tree_start not in ends and by_stop[tree_start] == rank:
                tree_start = next(a for a, b in spans if b == tree_start)
            if follows or stop == ends[-1]:
                total += heads * channels * width
                if tree_start not in ends:
                    total += heads * (1 if kind == "ssd" else channels**2)
        elements.append(2 * 8 * total)
    return [[(layout.shards - 1) * max(elements), sum(elements) - own] for own in elements]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_states_and_maps_are_planned_and_do_not_depend_on_length(worlds, kind):
    layer, double = "ssd" if kind == "ssd" else "gated_delta_rule", SequenceLayout.zigzag(2 * LENGTH, 4)
    cases = [(kind, layout, mask) for layout in LAYOUTS.values() for mask in MASKS.values()]
    cases += [(kind, double, None), (kind, double, AttentionMask(documents=[0, 26, LENGTH, 2 * LENGTH]))]
    sent = [list(ranks) for ranks in zip(*worlds(4).run(each, layer_bytes, cases), strict=True)]
    for (_, layout, mask), by_rank in zip(cases, sent, strict=True):
        plan = state_comm_plan(layer, layout, heads=4, key_dim=6, value_dim=5, batch=2, mask=mask, element_size=8)
        assert by_rank == [[plan.bytes(r, phase=phase) for phase in ("forward", "backward")] for r in range(4)]
        if mask is None or mask is MASKS["documents"]:
            assert by_rank == expected_bytes(kind, layout, [0, layout.length] if mask is None else [0, 13, 24, LENGTH])
    zigzag = [by_rank for (_, layout, _), by_rank in zip(cases, sent, strict=True) if layout is LAYOUTS["zigzag"]]
    assert sent[-2:] == zigzag[:2]
    # A zigzag shard has two spans: two states and two maps per row, and gradients of those of the three other shards.
    assert zigzag[0][0][0] == 3 * 2 * 8 * 2 * (4 * 6 * 5 + (4 if kind == "ssd" else 4 * 6 * 6))


def moved(source: SequenceLayout, target: SequenceLayout) -> list[int]:
    ring = mesh(ring=4)["ring"]
    x = source.take(torch.zeros(2, LENGTH, 3), Axis.of(ring).rank).requires_grad_()
    with CommLedger() as ledger:
        relayout(x, source, target, ring).sum().backward()
    return phases_of(ledger)


def convolved(layout: SequenceLayout, mask: AttentionMask | None, width: int) -> list[int]:
    ring = mesh(ring=4)["ring"]
    x = layout.take(torch.zeros(2, LENGTH, 3, dtype=torch.bfloat16), Axis.of(ring).rank).requires_grad_()
    with CommLedger() as ledger:
        short_convolution(x, x.new_zeros(3, width), layout, ring, mask=mask).sum().backward()
    return phases_of(ledger)


def test_plans_of_relayouts_and_halos_equal_sent_bytes(worlds):
    moves = [*product(LAYOUTS.values(), LAYOUTS.values())]
    halos = [*product(LAYOUTS.values(), MASKS.values(), (1, 4))]
    plans = [relayout_comm_plan(source, target, 2 * 3 * 4) for source, target in moves]
    plans += [halo_comm_plan(layout, width - 1, 3, torch.bfloat16, 2, mask) for layout, mask, width in halos]
    sent = zip(worlds(4).run(each, moved, moves), worlds(4).run(each, convolved, halos), strict=True)
    for rank, (of_moves, of_halos) in enumerate(sent):
        for case, plan, actual in zip([*moves, *halos], plans, [*of_moves, *of_halos], strict=True):
            assert actual == [plan.bytes(rank, phase=phase) for phase in ("forward", "backward")], (rank, case)


def test_one_rank_sends_nothing():
    alone = SequenceLayout.contiguous(LENGTH, 1)
    plan = state_comm_plan("ssd", alone, heads=4, key_dim=6, value_dim=5)
    assert plan.forward == plan.backward == ()
