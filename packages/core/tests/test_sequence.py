"""Distributing and gathering a sequence by a layout, against the layout's take and join, in float64."""

import pytest
import torch
from core_cases import LAYOUTS, each, random
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from armillary.core import CommLedger, SequenceLayout, distribute_sequence, gather_sequence, sequence_from_local
from armillary.core.internal import compat
from armillary.core.layout import shard_order
from armillary.core.testing import mesh
from armillary.core.testing.dtensors import place

S0, S1, S2, R = Shard(0), Shard(1), Shard(2), Replicate()
KINDS = {
    **LAYOUTS,
    "stripes of 2": lambda length, shards: SequenceLayout.striped(length, shards, stripe=2),
    "balanced": lambda length, shards: SequenceLayout.balanced(length, shards, documents=[0, length // 3, length]),
    "backwards": lambda length, shards: SequenceLayout(
        [[range(length - 1 - i, length - i) for i in range(r * length // shards, (r + 1) * length // shards)]
         for r in range(shards)]
    ),
}  # fmt: skip


# -- without ranks ----------------------------------------------------------------------------------------------------


def test_sequence_is_sharded_over_the_expected_axes(fake_mesh):
    sixteen, two = torch.zeros(1, 16), SequenceLayout.zigzag(16, 2)
    four, eight = SequenceLayout.zigzag(16, 4), SequenceLayout.zigzag(16, 8)
    ranks = fake_mesh(shard=2, ring=2, ulysses=2, tp=2)
    axis_names = ("shard", "ring", "ulysses", "tp")
    for names, layout, axes, expected in (
        (axis_names, four, None, [R, S1, S1, R]),
        (axis_names, two, None, [R, S1, S1, R]),  # a shard per rank of the ring, split again over ulysses
        (axis_names, two, ["shard"], [S1, R, R, R]),
        (("ring", "tp"), two, None, [S1, R]),
        (("ulysses",), SequenceLayout.contiguous(16, 1), None, [S1]),
        (("ring", "ulysses"), four, None, [S1, S1]),
        (("shard", "tp"), four, None, [S1, S1]),
        (("shard", "ring"), four, None, [S1, S1]),
        (("shard", "ring", "ulysses"), eight, None, [S1, S1, S1]),
    ):
        x = distribute_sequence(sixteen, layout, ranks[names], axes=axes)
        assert list(x.placements) == expected and x.device_mesh == ranks[names], (names, x.placements)


def test_rows_of_several_ranks_are_one_tensor(fake_mesh):
    layout = SequenceLayout.zigzag(16, 2)
    ranks = fake_mesh(5, shard=3, ring=2)
    x = random(0, 2, 8, 4)
    placed = sequence_from_local(x, layout, ranks["shard", "ring"], -2, rows=["shard"])
    assert placed.shape == (6, 16, 4) and list(placed.placements) == [S0, S1]
    assert torch.equal(placed.to_local(), x)


def test_one_rank_and_a_mesh_without_names(fake_mesh):
    layout = SequenceLayout([[range(8, 16), range(8)]])
    x = random(0, 2, 16).requires_grad_()
    fake_mesh(ring=1)
    unnamed = init_device_mesh("cpu", (1,))
    y = distribute_sequence(x, layout, unnamed)
    assert torch.equal(y.to_local(), x[:, [*range(8, 16), *range(8)]])
    z = gather_sequence(y, layout)
    assert torch.equal(z, x)
    (grad,) = torch.autograd.grad(z, x, random(1, 2, 16))
    assert torch.equal(grad, random(1, 2, 16))


# -- on ranks ---------------------------------------------------------------------------------------------------------


Case = tuple[dict[str, int], dict[str, Placement], str, int, tuple[int, ...], int]
"""(axes, by axis of the mesh how the result is placed, layout, length, the other dims, dim of the tokens)."""

BOTH: dict[str, Placement] = {"ring": S1, "ulysses": S1}
ON_TWO: list[Case] = [
    *(({"ring": 2}, {"ring": S1}, kind, 12, (2, 3), 1) for kind in ("zigzag", "balanced")),
    ({"ulysses": 2}, {"ulysses": S1}, "zigzag", 13, (2, 3), 1),
    ({"ring": 2}, {"ring": S0}, "zigzag", 9, (3,), 0),
]
ON_FOUR: list[Case] = [
    *(({"ring": 4}, {"ring": S1}, kind, 16, (2, 3), 1) for kind in list(KINDS)[::2]),
    *(({"ring": 2, "ulysses": 2}, BOTH, kind, 16, (2, 3), 1) for kind in list(KINDS)[1::2]),
    *(({"ring": 2, "ulysses": 2}, BOTH, kind, 11, (2, 3), 1) for kind in ("contiguous", "zigzag", "striped")),
    ({"ulysses": 4}, {"ulysses": S1}, "contiguous", 11, (1, 1), 1),
    ({"ring": 4}, {"ring": S0}, "zigzag", 16, (), 0),
    ({"ring": 4}, {"ring": S2}, "striped", 15, (2, 1), 2),
    ({"ring": 2, "tp": 2}, {"ring": S1, "tp": R}, "zigzag", 10, (3, 2), 1),
    ({"shard": 2, "ring": 2}, {"shard": R, "ring": S1}, "zigzag", 10, (2, 2), 1),
]


def full_tensor(length: int, sizes: tuple[int, ...], dim: int, seed: int = 0) -> Tensor:
    """Random numbers with permuted strides."""
    shape = list(sizes)
    shape.insert(dim, length)
    return random(seed, *reversed(shape)).permute(*reversed(range(len(shape))))


def faults(
    axes: dict[str, int], placed: dict[str, Placement], kind: str, length: int, other_sizes, dim: int
) -> list[str]:
    on = mesh(**axes)[tuple(placed)]
    places = [place for place, placement in enumerate(placed.values()) if placement != R]
    layout = KINDS[kind](length, on.size() // (1 if len(places) == on.ndim else 2))
    shard = 0
    for axis in places:
        shard = shard * on.size(axis) + on.get_local_rank(axis)
    full = full_tensor(length, other_sizes, dim)
    x = full.clone(memory_format=torch.preserve_format).requires_grad_()
    with CommLedger() as ledger:
        y = distribute_sequence(x, layout, on, dim)
    z = gather_sequence(y, layout)
    up, order = full_tensor(length, other_sizes, dim, seed=1), shard_order(layout)
    (to_y,) = torch.autograd.grad(z, y, up, retain_graph=True)
    (to_x,) = torch.autograd.grad(z, x, up, retain_graph=True)
    (through,) = torch.autograd.grad((y * y).full_tensor(), x, up)  # by torch alone
    unordered = up.index_select(dim, order.argsort())
    checks = {
        "sent nothing": ledger.bytes() == 0,
        "placements": list(y.placements) == list(placed.values()) == list(to_y.placements),
        "shape": y.shape == full.shape,
        "local": torch.equal(y.to_local(), layout.take(full, shard, dim)),
        "full_tensor": torch.equal(y.full_tensor(), full.index_select(dim, order)),
        "whole": torch.equal(z, full),
        "gradient of the DTensor": torch.equal(to_y.to_local(), layout.take(up, shard, dim)),
        "gradient": torch.equal(to_x, up),
        "gradient of full_tensor": torch.equal(through, 2 * full * unordered),
        "dim": torch.equal(gather_sequence(y, layout, dim - full.ndim), full),
        "replicated": torch.equal(gather_sequence(y.redistribute(placements=[R] * on.ndim), layout, dim), full),
    }
    part = layout.take(full, shard, dim).requires_grad_()
    result = sequence_from_local(part, layout, on, dim)
    (to_part,) = torch.autograd.grad(result, part, to_y)
    checks["from local"] = torch.equal(result.to_local(), part) and result.placements == y.placements
    checks["from local, of the whole"] = result.shape == y.shape
    checks["from local, gradient"] = torch.equal(to_part, to_y.to_local())
    ids = torch.arange(full.numel()).view(full.shape)
    checks["integers"] = torch.equal(gather_sequence(distribute_sequence(ids, layout, on, dim), layout, dim), ids)
    return [name for name, right in checks.items() if not right]


@pytest.mark.parametrize(("ranks", "cases"), [(2, ON_TWO), (4, ON_FOUR)])
def test_distribute_and_gather_match_the_layouts_take_and_join(worlds, ranks, cases):
    for rank in worlds(ranks).run(each, faults, cases, timeout=100):
        for actual, case in zip(rank, cases, strict=True):
            assert actual == [], case


def joined(length: int, kind: str) -> list[bool]:
    """Gathers on a flattened mesh, as for FSDP2, where torch (2.11 to 2.15) gathers uneven shards wrongly."""
    whole_mesh = mesh(ring=2, ulysses=2)
    compat.flatten(whole_mesh, ("shard", "ring", "ulysses"), "joint")
    on, layout = whole_mesh["ring", "ulysses"], KINDS[kind](length, 4)
    x, up = random(0, 2, length, 3).requires_grad_(), random(1, 2, length, 3)
    y = distribute_sequence(x, layout, on)
    z = gather_sequence(y, layout)
    (grad,) = torch.autograd.grad(z, x, up)
    partial = place(x.detach()[:, shard_order(layout)], whole_mesh["ring", "tp"], [S1, Partial()])
    summed = gather_sequence(partial, layout) - x
    return [torch.equal(z, x), torch.equal(grad, up), bool((summed.abs() <= 1e-14).all())]


def test_gather_on_a_flattened_mesh(worlds):
    for rank in worlds(4).run(each, joined, [(9, "striped"), (16, "zigzag")]):
        assert rank == [[True] * 3] * 2


def trained() -> list[float]:
    """A weight sharded over tp, on ring x ulysses x tp; then a gradient that is partial over tp."""
    on = mesh(ring=2, ulysses=2, tp=2)["ring", "ulysses", "tp"]
    layout = SequenceLayout.zigzag(12, 2)
    x, weight, up = random(0, 2, 12).requires_grad_(), random(1, 6).requires_grad_(), random(2, 2, 12, 6)
    expected = torch.autograd.grad((x.unsqueeze(-1) * weight).tanh(), (x, weight), up)
    local_weight = weight.detach().split(3)[on.get_local_rank("tp")].requires_grad_()
    sharded = DTensor.from_local(local_weight, on, [R, R, S0])
    y = (distribute_sequence(x, layout, on).unsqueeze(-1) * sharded).tanh()
    out = gather_sequence(y, layout)
    gathered = gather_sequence(y, layout, grad_placements=[R, R, Partial()])
    first = torch.autograd.grad(out, (x, sharded), up, retain_graph=True)
    second = torch.autograd.grad(gathered, (x, sharded), up / 2)
    return [
        (result - expected_grad).abs().max().item()
        for grads in (first, second)
        for result, expected_grad in zip((grads[0], grads[1].full_tensor()), expected, strict=True)
    ]


def test_gradients_through_a_sharded_layer(worlds):
    for actual in worlds(8).run(trained, timeout=60):
        assert max(actual) <= 1e-13
