"""The primitives on DTensors are redistributions: placements, values and gradients equal torch's."""

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import pytest
import torch
from core_cases import counted, poisoned, random
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from armillary.core import (
    CommLedger,
    LogSumExpPartial,
    all_gather,
    head_to_seq,
    merge_scatter,
    reduce_scatter,
    seq_to_head,
)
from armillary.core.internal import compat, dtensor
from armillary.core.logsumexp_partial import pack_partial, unpack_partial
from armillary.core.testing import mesh
from armillary.core.testing.dtensors import draw_placements, local_part, place

EXACT = 1e-14
MESHES = {
    4: ({"ring": 4}, {"ulysses": 4}, {"ring": 2, "ulysses": 2}, {"shard": 2, "ring": 2}, {"ring": 2, "tp": 2}),
    8: ({"shard": 2, "ring": 2, "tp": 2}, {"ring": 2, "ulysses": 2, "tp": 2}, {"ring": 4, "tp": 2}, {"ring": 8}),
}
CALLS = {call.__name__: call for call in (seq_to_head, head_to_seq, all_gather, reduce_scatter)}
REDISTRIBUTIONS: dict[str, Callable[[int], tuple[Placement, Placement]]] = {
    "seq_to_head": lambda dim: (Shard(1), Shard(2)),
    "head_to_seq": lambda dim: (Shard(2), Shard(1)),
    "all_gather": lambda dim: (Shard(dim), Replicate()),
    "reduce_scatter": lambda dim: (Partial(), Shard(dim)),
}


class Case(NamedTuple):
    """A call, with the placements of its argument and its result; `dim` is the dimension of tokens."""

    name: str
    over: DeviceMesh
    axis: str
    dim: int
    shape: tuple[int, ...]
    before: tuple[Placement, ...]
    after: tuple[Placement, ...]

    def call(self, x: DTensor) -> DTensor:
        options = {} if self.name.endswith(("head", "seq")) else {"dim": self.dim}
        return CALLS[self.name](x, self.over[self.axis], **options)

    def fits(self) -> bool:
        """True if no inner axis shards a dimension that the call splits or joins."""
        place = self.over.mesh_dim_names.index(self.axis)
        cut = {p.dim for p in (self.before[place], self.after[place]) if isinstance(p, Shard)}
        return not any(isinstance(p, Shard) and p.dim in cut for p in self.before[place + 1 :])


def drawn(ranks: int, number: int) -> Case:
    """Returns the case of this number, a pure function of both."""
    draw = Random(f"{ranks} {number}")
    while True:
        axes = draw.choice(MESHES[ranks])
        over, axis, name = mesh(**axes)[tuple(axes)], draw.choice(list(axes)), draw.choice(list(CALLS))
        dim = 1 if name.endswith(("head", "seq")) else draw.randint(0, 3)
        shape = (draw.randint(1, 3), draw.randint(1, 20), draw.randint(1, 9), 2)
        before, after = REDISTRIBUTIONS[name](dim)
        placed = draw_placements(draw, over, (0, 1, 2), {axis: before})
        result = tuple(after if n == axis else p for n, p in zip(over.mesh_dim_names, placed, strict=True))
        actual = Case(name, over, axis, dim, shape, placed, result)
        if actual.fits():
            return actual


def differences(case: Case) -> list[str]:
    """Differences of a call from torch's redistribution, and of gradients for upstream gradients of all placements."""
    full, up = random(0, *case.shape), random(1, *case.shape)
    x, same = (place(full, case.over, case.before).requires_grad_() for _ in range(2))
    with counted():
        y = case.call(x)
    expected = same.redistribute(placements=case.after)
    ups = [place(up, case.over, case.after)]
    if case.name == "all_gather":  # also a partial upstream gradient
        placements = [
            Partial() if n == case.axis else p for n, p in zip(case.over.mesh_dim_names, case.after, strict=True)
        ]
        ups.append(place(up, case.over, placements))
    pairs = [(y, expected)]
    wrong = list[str]()
    for grad in ups:
        with poisoned(), CommLedger() as ledger:
            (gradient,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        pairs.append((gradient, torch.autograd.grad(expected, same, grad, retain_graph=True)[0]))
        if case.name == "all_gather" and grad is ups[0] and ledger.bytes():
            wrong.append("a replicated gradient was sent")
    wrong += [f"{result} is not {expected}" for result, expected in pairs if not equal(result, expected)]
    return wrong + ["value"] * (not close(y.to_local(), local_part(full, case.over, case.after)))


def equal(got: DTensor, expected: DTensor) -> bool:
    placed = got.placements == expected.placements and got.shape == expected.shape
    return placed and close(got.to_local(), expected.to_local())


def close(got: Tensor, expected: Tensor) -> bool:
    return got.shape == expected.shape and ((got - expected).abs() <= EXACT * 10).all().item()


def all_differences(ranks: int, numbers: Sequence[int]) -> list[tuple[str, list[str]]]:
    cases = [drawn(ranks, number) for number in numbers]
    return [(f"{case}", differences(case)) for case in cases]


@pytest.mark.parametrize(("ranks", "count"), [(4, 60), (8, 12)])
def test_collectives_equal_torchs_redistribute(worlds, ranks, count):
    for rank in worlds(ranks).run(all_differences, ranks, range(count), timeout=200):
        assert [actual for actual in rank if actual[1]] == []


def merged() -> list[bool]:
    """Compares `merge_scatter` with torch's redistribution of `LogSumExpPartial`, also for uneven and empty shards.

    Gradients are compared with those of local tensors. The heads are sharded over another axis.
    """
    actual, over = list[bool](), mesh(ring=2, tp=2)["ring", "tp"]
    axis, seed = over["ring"], over.get_local_rank("ring")
    for tokens in (12, 9, 1):
        heads = slice(2 * over.get_local_rank("tp"), 2 * over.get_local_rank("tp") + 2)
        out, lse = random(seed, 2, tokens, 4, 3)[:, :, heads], random(9 + seed, 2, tokens, 4)[:, :, heads]
        local = [x.contiguous().requires_grad_() for x in (out, lse)]
        sizes = dtensor.chunk_sizes(tokens, 2)
        partials = [DTensor.from_local(x, over, [LogSumExpPartial(packed=False), Shard(2)]) for x in local]
        packed = DTensor.from_local(pack_partial(out, lse), over, [LogSumExpPartial(), Shard(2)])
        result, plain = merge_scatter(*partials, axis), merge_scatter(*local, axis, sizes=sizes)
        expected = unpack_partial(packed.redistribute(placements=[Shard(1), Shard(2)]))
        actual += [equal(a, b) for a, b in zip(result, expected, strict=True)]
        ups = [random(7 + i, *x.shape) for i, x in enumerate(plain)]
        grads = torch.autograd.grad([x.to_local() for x in result], local, ups)
        actual += [torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(plain, local, ups), strict=True)]
    return actual


def test_redistributing_packed_partials_merges_them(worlds):
    assert all(all(rank) for rank in worlds(4).run(merged))


def gradients_of_uneven_shards(old_torch: bool) -> list[bool]:
    """Compares gradients through `to_local`, which come in the layout of their tensor and in another."""
    over, actual = mesh(ring=2)["ring"], []
    for full in (random(2, 3, 7, 2), random(2, 2, 7, 3).transpose(0, 2)):
        x = distribute_tensor(random(1, 3, 7, 2), over, [Shard(1)]).requires_grad_()
        local = compat._ToLocal.apply(x, [Shard(1)]) if old_torch else compat.to_local(x, [Shard(1)])
        upstream = full.chunk(2, 1)[over.get_local_rank()]
        (gradient,) = torch.autograd.grad(local, x, upstream, retain_graph=True)
        local.backward(upstream)  # torch 2.11 accumulates by stride
        actual += [each.placements == (Shard(1),) and each.shape == x.shape for each in (gradient, x.grad)]
        actual += [torch.equal(each.full_tensor(), full) for each in (gradient, x.grad)]
        actual.append(not old_torch or gradient.stride() == x.stride())
    return actual


@pytest.mark.parametrize("old_torch", [False, True])
def test_gradients_of_uneven_shards_stay_sharded(worlds, old_torch):
    assert all(all(rank) for rank in worlds(2).run(gradients_of_uneven_shards, old_torch))
