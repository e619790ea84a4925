"""A ring between nodes around a method within each node: unnamed combinations, bytes in closed form.

`test_attention_conformance.py` tests the named ones under all masks and layouts, `test_attention_bytes.py` their plans.
"""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from armillary.attention import (
    AllGatherKV,
    AttentionMask,
    AttentionShape,
    Local,
    Method,
    Ring,
    TokenRing,
    UPipe,
    build_attention,
    build_comm_plan,
)
from armillary.attention.plans import named_method
from armillary.attention.rotation.nodes import NodeRings
from armillary.attention.tiling.grid import Grid, PartialLayout
from armillary.core import SequenceLayout
from armillary.core.testing import mesh
from conformance import Case, cases, check

FULL = AttentionMask(causal=False)


def combination(name: str) -> Method:
    """Builds a combination over 2 x 2 ranks, or with three levels over 8 ranks."""
    match name:
        case "queries, queries":
            return Ring(*_nodes(), "queries", Ring(*_devices(), "queries"))
        case "keys, keys":
            return Ring(*_nodes(), "keys", Ring(*_devices(), "keys"))
        case "queries, token ring":
            return Ring(*_nodes(), "queries", TokenRing(*_devices()))
        case "keys, all-gather":
            return Ring(*_nodes(), "keys", AllGatherKV(*_devices()))
        case "queries, all-gather":
            return Ring(*_nodes(), "queries", AllGatherKV(*_devices()))
        case _:
            raise ValueError(name)


def _nodes() -> list[Any]:
    return [mesh(nodes=2, devices=2)["nodes"]]


def _devices() -> list[Any]:
    return [mesh(nodes=2, devices=2)["devices"]]


def failures(attend: Method, chosen: list[Case]) -> list[str]:
    """Returns the errors of failing cases. Ranks stay synchronized after a failed check, so the next case can run."""
    failed = list[str]()
    for case in chosen:
        try:
            check(attend, case)
        except AssertionError as failure:
            failed.append(str(failure))
    return failed


COMBINATIONS = ("queries, queries", "keys, keys", "queries, token ring", "keys, all-gather", "queries, all-gather")


def conform() -> list[str]:
    every = [(name, combination(name), cases(brief=i)[i::5]) for i, name in enumerate(COMBINATIONS)]
    return [f"{name}: {failure}" for name, attend, chosen in every for failure in failures(attend, chosen)]


def test_each_rotating_side_between_nodes_around_each_method(worlds):
    assert worlds(4).run(conform) == [[]] * 4


def conform_with_one_rank_on_an_axis() -> list[str]:
    actual = list[str]()
    for i, axes in enumerate(({"nodes": 2, "devices": 1}, {"nodes": 1, "devices": 2})):
        over = mesh(**axes)
        inner = [Ring(over["devices"]), TokenRing(over["devices"]), AllGatherKV(over["devices"])]
        inner += [Local()] if axes["devices"] == 1 else []
        for j, method in enumerate(inner):
            actual += failures(Ring(over["nodes"], inner=method), cases(brief=i + j)[j::6])
    return actual


def test_one_rank_on_either_axis(worlds):
    assert worlds(2).run(conform_with_one_rank_on_an_axis) == [[]] * 2


def conform_in_three_levels() -> list[str]:
    over = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("racks", "nodes", "devices"))
    attend = Ring(over["racks"], inner=Ring(over["nodes"], inner=TokenRing(over["devices"])))
    assert [axis.name for axis in attend.axes] == ["racks", "nodes", "devices"]
    return failures(attend, cases(brief=3)[::5])


def test_three_levels(worlds):
    assert worlds(8).run(conform_in_three_levels) == [[]] * 8


# -- plans ------------------------------------------------------------------------------------------------------------


def shape(
    shards: int, mask: AttentionMask = FULL, kv_heads: int = 4, tokens: int = 16, **options: Any
) -> AttentionShape:
    layout = SequenceLayout.zigzag(shards * tokens, shards)
    fields = {"heads": 4, "kv_heads": kv_heads, "head_dim": 8, "dtype": torch.bfloat16, "batch": 2} | options
    return AttentionShape.of(layout, mask, **fields)


@pytest.mark.parametrize(("nodes", "devices"), [(2, 2), (2, 4), (4, 2), (3, 3)])
def test_bytes_of_each_network_under_a_full_mask(nodes, devices):
    """B 2, T 16, H 4, D 8, e 2, a 4: keys cross nodes M - 1 times; queries or keys visit D - 1 devices at M steps."""
    for kv_heads in (4, 1):
        work = shape(nodes * devices, kv_heads=kv_heads)
        q, k, lse = 2 * 16 * 4 * 8, 2 * 16 * kv_heads * 8, 2 * 16 * 4
        keys, queries = 2 * k * 2, q * 2
        passed = 3 * q * 2 + lse * 4, q * 4  # queries with out, dout and lse; dq
        by_queries = sum(passed) < 2 * k * (2 + 4)
        ring_backward = sum(passed) if by_queries else 2 * k * (2 + 4)
        expected = {
            ("ring+ring", "nodes"): ((nodes - 1) * keys, (nodes - 1) * ring_backward),
            ("ring+ring", "devices"): (nodes * (devices - 1) * keys, nodes * (devices - 1) * ring_backward),
            ("ring+token_ring", "nodes"): ((nodes - 1) * keys, (nodes - 1) * ring_backward),
            ("ring+token_ring", "devices"): (
                nodes * (devices - 1) * (2 * queries + lse * 4),
                nodes * (devices - 1) * sum(passed),
            ),
        }
        for (name, axis), sent_bytes in expected.items():
            plan = build_comm_plan(name, work, nodes * devices, nodes=nodes)
            for rank in range(nodes * devices):
                phases = ("forward", "backward")
                assert tuple(plan.bytes(rank, "p2p", phase, axis) for phase in phases) == sent_bytes
                assert plan.bytes(rank) == sum(plan.bytes(rank, "p2p", axis=axis) for axis in ("nodes", "devices"))


@pytest.mark.parametrize("name", ["ring+ring", "ring+token_ring"])
def test_tokens_cross_nodes_less_often_than_in_a_ring_of_all_ranks(name):
    """Of P ranks on nodes of D devices, P - D shards of keys leave a node, and P - 1 in a ring of all ranks."""
    nodes, devices, keys = 2, 4, 2 * (2 * 16 * 4 * 8) * 2
    work, ranks = shape(8), range(8)
    plan, flat = build_comm_plan(name, work, 8, nodes=nodes), build_comm_plan("ring", work, 8)
    crossing = sum(plan.bytes(rank, phase="forward", axis="nodes") for rank in ranks)
    flat_crossing = sum(
        send.bytes
        for step in flat.forward
        for each in step.moves
        for send in each.sends
        if send.source // devices != send.target // devices
    )
    assert (crossing, flat_crossing) == (nodes * (8 - devices) * keys, nodes * 7 * keys)


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
def test_every_visible_pair_meets_in_one_step_of_one_node(kind):
    layout = getattr(SequenceLayout, kind)(61, 6)
    for mask in (AttentionMask(), AttentionMask(window=(7, 0)), AttentionMask(documents=(0, 4, 33, 50, 61))):
        full = Grid(layout, layout, mask)
        pairs = sum(full.pairs(query, key, 1) for query in range(6) for key in range(6))
        for side in ("keys", "queries"):
            rings, met = NodeRings.of(3, side, full), 0
            for node in range(2):
                for step in filter(None, (rings.step(node, step) for step in range(2))):
                    part = Grid(step.layout, step.key_layout, mask)
                    met += sum(part.pairs(query, key, 1) for query in range(3) for key in range(3))
            assert met == pairs


def test_partial_layouts_differ_by_the_length_of_their_sequence():
    spans = [[range(4)], []]
    ten, twenty = PartialLayout(spans, 10), PartialLayout(spans, 20)
    assert (ten.sizes, ten.length, twenty.length) == ((4, 0), 10, 20)
    assert ten == PartialLayout(spans, 10) != twenty
    assert ten.coarsen(2) == PartialLayout([[range(4)]], 10)


# -- names and meshes -------------------------------------------------------------------------------------------------


def built() -> list[Any]:
    over = mesh(nodes=2, devices=2)
    attend, plain = build_attention("ring+token_ring", over), build_attention("ring+ring", over, backward="queries")
    assert isinstance(attend, Ring) and isinstance(attend.inner, TokenRing)
    assert isinstance(plain, Ring) and isinstance(plain.inner, Ring)
    assert (plain.backward_side, plain.inner.backward_side) == ("queries", "queries")
    heads = build_attention("upipe+ring+ring", mesh(nodes=2, devices=1, ulysses=2))
    assert isinstance(heads, UPipe) and [axis.name for axis in heads.axes] == ["nodes", "devices", "ulysses"]
    assert isinstance(build_attention("ring+ring", mesh(shard=4, nodes=1, devices=1)), Local)
    return [attend.shard, attend.shards, [axis.name for axis in attend.axes]]


def test_device_d_of_node_n_has_shard_n_d(worlds):
    assert worlds(4).run(built) == [[rank, 4, ["nodes", "devices"]] for rank in range(4)]


def test_nodes_of_a_plan_are_chosen_by_the_ranks():
    assert build_comm_plan("ring+ring", shape(9), 9) == build_comm_plan("ring+ring", shape(9), 9, nodes=3)
    assert named_method("ulysses+ring+ring").mesh_axes({"ring": 6, "ulysses": 2}) == {
        "ring": 1,
        "nodes": 2,
        "devices": 3,
        "ulysses": 2,
    }
