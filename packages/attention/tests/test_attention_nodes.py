"""A ring between nodes around a method within each node: unnamed combinations, bytes in closed form.

`test_attention_conformance.py` tests the named ones under all masks and layouts, `test_attention_bytes.py` their plans.
"""

from typing import Any

import pytest
import torch
from checked import failures_of
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
from armillary.attention.internal import named_method
from armillary.core import SequenceLayout
from armillary.core.testing import mesh
from conformance import cases

FULL = AttentionMask(causal=False)


COMBINATIONS = [
    ("queries", Ring),
    ("keys", Ring),
    ("queries", TokenRing),
    ("keys", AllGatherKV),
    ("queries", AllGatherKV),
    ("keys", Local),
]
"""The rotating side between nodes, and the method within a node, which rotates the same side."""


def combination(side: str, inner: type[Method]) -> Method:
    over = mesh(nodes=2, devices=2)
    arguments = {Ring: (over["devices"], side), Local: ()}.get(inner, (over["devices"],))
    return Ring(over["nodes"], side, inner(*arguments))


def conform() -> list[str]:
    every = [(combination(*each), cases(brief=i % 5)[i::6]) for i, each in enumerate(COMBINATIONS)]
    return [f"{attend}: {failure}" for attend, chosen in every for failure in failures_of(attend, chosen)]


def test_each_rotating_side_between_nodes_around_each_method(worlds):
    assert worlds(4).run(conform) == [[]] * 4


def conform_in_three_levels() -> list[str]:
    over = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("racks", "nodes", "devices"))
    attend = Ring(over["racks"], inner=Ring(over["nodes"], inner=TokenRing(over["devices"])))
    assert [axis.name for axis in attend.axes] == ["racks", "nodes", "devices"]
    return failures_of(attend, cases(brief=3)[::12])


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
    facer = build_attention("wallfacer", mesh(ring=4), team=1, placement="p2p_intra", backward="queries")
    assert (facer.teams.placement, facer.team_ring.backward_side, facer.teams.team_size) == ("p2p_intra", "queries", 1)
    assert build_attention("ring", mesh(ring=4), backward="keys").backward_side == "keys"
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
