"""Plans of layers with a state and of relayouts, compared with every rank's ledger to the byte."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from test_states import inputs_of, layer_of, local_inputs

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


def layer_bytes(kind: str, layout: SequenceLayout, mask: AttentionMask | None) -> list[int]:
    """Returns the bytes of a layer's forward and backward, with float64 states and 2 rows."""
    ring = mesh(ring=4)["ring"]
    local = {
        name: x.requires_grad_()
        for name, x in local_inputs(inputs_of(kind, LENGTH), layout, Axis.of(ring).rank).items()
    }
    with CommLedger() as ledger:
        out, _ = layer_of(kind)(**local, layout=layout, axis=ring, mask=mask)
        torch.autograd.grad(out.sum(), list(local.values()))
    return [ledger.bytes(phase=phase) for phase in ("forward", "backward")]


@pytest.mark.parametrize("kind", ["delta", "channels", "ssd"])
def test_plans_of_states_equal_sent_bytes(worlds, kind):
    layer = "ssd" if kind == "ssd" else "gated_delta_rule"
    for name, layout in LAYOUTS.items():
        for mask in MASKS.values():
            plan = state_comm_plan(layer, layout, heads=4, key_dim=6, value_dim=5, batch=2, mask=mask, element_size=8)
            expected = [[plan.bytes(r, phase=phase) for phase in ("forward", "backward")] for r in range(4)]
            assert worlds(4).run(layer_bytes, kind, layout, mask) == expected, (name, mask)


def moved(source: SequenceLayout, target: SequenceLayout) -> list[int]:
    ring = mesh(ring=4)["ring"]
    x = source.take(torch.zeros(2, LENGTH, 3), Axis.of(ring).rank).requires_grad_()
    with CommLedger() as ledger:
        relayout(x, source, target, ring).sum().backward()
    return [ledger.bytes(phase=phase) for phase in ("forward", "backward")]


def test_plans_of_relayouts_equal_sent_bytes(worlds):
    for source in LAYOUTS.values():
        for target in LAYOUTS.values():
            plan = relayout_comm_plan(source, target, 2 * 3 * 4)
            expected = [[plan.bytes(r, phase=phase) for phase in ("forward", "backward")] for r in range(4)]
            assert worlds(4).run(moved, source, target) == expected


def convolved(layout: SequenceLayout, mask: AttentionMask | None, width: int) -> list[int]:
    ring = mesh(ring=4)["ring"]
    x = layout.take(torch.zeros(2, LENGTH, 3, dtype=torch.bfloat16), Axis.of(ring).rank).requires_grad_()
    with CommLedger() as ledger:
        short_convolution(x, x.new_zeros(3, width), layout, ring, mask=mask).sum().backward()
    return [ledger.bytes(phase=phase) for phase in ("forward", "backward")]


def test_plans_of_halos_equal_sent_bytes(worlds):
    for layout, mask, width in product(LAYOUTS.values(), MASKS.values(), (1, 4)):
        plan = halo_comm_plan(layout, width - 1, 3, torch.bfloat16, 2, mask)
        expected = [[plan.bytes(r, phase=phase) for phase in ("forward", "backward")] for r in range(4)]
        assert worlds(4).run(convolved, layout, mask, width) == expected, (layout, mask, width)


def test_one_rank_sends_nothing():
    alone = SequenceLayout.contiguous(LENGTH, 1)
    plan = state_comm_plan("ssd", alone, heads=4, key_dim=6, value_dim=5)
    assert plan.forward == plan.backward == ()
