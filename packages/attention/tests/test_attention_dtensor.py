"""Attention on DTensors equals attention on local tensors, and results have explicit placements."""

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from armillary.attention import AttentionMask, Local, Method, Ring, TokenRing, Ulysses, reference_attention
from armillary.core import CommLedger, SequenceLayout
from armillary.core.testing import mesh, relative_error
from armillary.core.testing.dtensors import place

EXACT = 1e-10
B, H, K, D, DV = 2, 8, 4, 16, 8
TOKENS, HEADS = Shard(1), Shard(2)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def full_tensors(length: int) -> list[Tensor]:
    """Returns global q, k, v, dout."""
    shapes = ((H, D), (K, D), (K, DV), (H, DV))
    return [random(i, B, length, heads, dim) for i, (heads, dim) in enumerate(shapes)]


def expected(length: int, mask: AttentionMask) -> list[Tensor]:
    """Returns global out, lse, dq, dk, dv."""
    *qkv, dout = full_tensors(length)
    leaves = [x.requires_grad_() for x in qkv]
    out, lse = reference_attention(*leaves, mask=mask, return_lse=True)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def build(name: str, axes: DeviceMesh) -> Method:
    match name:
        case "local":
            return Local()
        case "ring":
            return Ring(axes["ring"])
        case "ulysses":
            return Ulysses(axes["ulysses"])
        case "ring+token_ring":
            return Ring(axes["nodes"], inner=TokenRing(axes["devices"]))
        case _:
            return Ulysses(axes["ulysses"], inner=Ring(axes["ring"]))


def distributed(x: Tensor, layout: SequenceLayout, over: DeviceMesh, placements: list[Placement]) -> DTensor:
    """Distributes the global tensor in the order of the layout's shards."""
    order = torch.cat([layout.positions(shard) for shard in range(layout.shards)])
    return distribute_tensor(x[:, order], over, placements)


def attended(
    name: str, sizes: dict[str, int], placed: dict[str, Placement], length: int, kind: str, compiled: bool = False
) -> tuple[float, float]:
    """Returns the worst error against the oracle, and the worst difference from local tensors."""
    over = mesh(**sizes)[tuple(placed)]
    attend, placements = build(name, mesh(**sizes)), list(placed.values())
    layout, mask = attend.layout(length, kind=kind), AttentionMask(window=(length // 2, None))
    *qkv, dout = (distributed(x, layout, over, placements) for x in full_tensors(length))
    leaves = [x.requires_grad_() for x in qkv]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = attend(q, k, v, mask=mask, layout=layout, return_lse=True)
        return out, lse.detach()  # torch wants a gradient for every differentiable DTensor output of a graph

    out, lse = (torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run)(*leaves)
    grads = torch.autograd.grad(out, leaves, dout)
    results = [out, lse, *grads]
    assert all(isinstance(x, DTensor) and list(x.placements) == placements for x in results)
    assert out.shape == (B, length, H, DV)

    local = [x.to_local().detach().requires_grad_() for x in leaves]
    plain, plain_lse = attend(*local, mask=mask, layout=layout, return_lse=True)
    same = [plain, plain_lse, *torch.autograd.grad(plain, local, dout.to_local())]
    order = torch.cat([layout.positions(shard) for shard in range(layout.shards)])
    reference = [x[:, order] for x in expected(length, mask)]
    return (
        max(relative_error(a.full_tensor().detach(), b) for a, b in zip(results, reference, strict=True)),
        max(relative_error(a.to_local().detach(), b.detach()) for a, b in zip(results, same, strict=True)),
    )


CASES: dict[str, tuple[str, dict[str, int], dict[str, Placement]]] = {
    "usp with tp": ("usp", {"ring": 2, "ulysses": 2, "tp": 2}, {"ring": TOKENS, "ulysses": TOKENS, "tp": HEADS}),
    "usp with data": (
        "usp", {"shard": 2, "ring": 2, "ulysses": 2}, {"shard": Shard(0), "ring": TOKENS, "ulysses": TOKENS},
    ),
    "ulysses, tp replicated": ("ulysses", {"ulysses": 2, "tp": 2}, {"ulysses": TOKENS, "tp": Replicate()}),
    "over nodes, with tp": (
        "ring+token_ring", {"nodes": 2, "devices": 2, "tp": 2}, {"nodes": TOKENS, "devices": TOKENS, "tp": HEADS},
    ),
    "ring with tp": ("ring", {"ring": 2, "tp": 2}, {"ring": TOKENS, "tp": HEADS}),
    "ulysses with data and tp": (
        "ulysses", {"shard": 2, "ulysses": 2, "tp": 2}, {"shard": Shard(0), "ulysses": TOKENS, "tp": HEADS},
    ),
    "axes of one rank": (
        "usp", {"shard": 2, "ring": 2}, {"shard": Shard(0), "ring": TOKENS, "ulysses": Replicate(), "tp": HEADS},
    ),
    "local": ("local", {"shard": 2, "tp": 2}, {"shard": Shard(0), "tp": HEADS}),
}  # fmt: skip


def ranks_of(case: str) -> int:
    return prod(CASES[case][1].values())


def each_of(names: Sequence[str], compiled: bool) -> dict[str, tuple[float, float]]:
    """Runs each case with one of two layouts in turn."""
    kinds = {name: ("zigzag", "contiguous")[i % 2] for i, name in enumerate(CASES)}
    return {name: attended(*CASES[name], 24, kinds[name], compiled) for name in names}


@pytest.mark.parametrize(
    ("ranks", "compiled"),
    [(4, False), *(pytest.param(8, compiled, marks=pytest.mark.long) for compiled in (False, True))],
    ids=["four", "eight", "in one graph"],
)
def test_dtensors_equal_local_tensors(worlds, ranks, compiled):
    """Compiles cases with heads over tp; other tests and random cases compile the others.

    On eight ranks `test_sinks` has tokens and heads sharded at once; random cases have rows and tokens.
    """
    names = ["usp with tp"] if compiled else [case for case in CASES if ranks_of(case) == ranks]
    for rank in worlds(ranks).run(each_of, names, compiled):
        for case, (error, difference) in rank.items():
            assert error <= EXACT, case
            assert difference == 0.0, case


def uneven(compiled: bool) -> list[tuple[float, float]]:
    """Runs one method of two axes in a graph, and two methods in eager mode."""
    lengths, actual = (11,) if compiled else (11, 15), list[tuple[float, float]]()
    methods = [("usp", ("ring", "ulysses")), ("ring+token_ring", ("nodes", "devices"))]
    for name, axes in methods[:1] if compiled else methods:
        sizes, placed = dict.fromkeys(axes, 2), dict.fromkeys(axes, TOKENS)
        actual += [attended(name, sizes, placed, length, "contiguous", compiled) for length in lengths]
    return actual


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "in one graph"])
def test_uneven_shards_in_dtensors_chunking(worlds, compiled):
    for error, difference in (actual for rank in worlds(4).run(uneven, compiled) for actual in rank):
        assert error <= EXACT
        assert difference == 0.0


def with_sinks(compiled: bool) -> list[float]:
    return [error_of_sinks(compiled, shape) for shape in ((H,), (3, H))]


def error_of_sinks(compiled: bool, shape: tuple[int, ...]) -> float:
    """Sinks sharded over tp: their gradient is partial over the axes that shard tokens."""
    heads = Shard(len(shape) - 1)
    built = mesh(ring=2, ulysses=1 if compiled else 2, tp=2)
    over, attend = built["ring", "ulysses", "tp"], build("usp", built)
    layout, mask = attend.layout(16), AttentionMask()
    *qkv, dout = (distributed(x, layout, over, [TOKENS, TOKENS, HEADS]) for x in full_tensors(16))
    sinks = distribute_tensor(random(9, *shape), over, [Replicate(), Replicate(), heads]).requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attend(q, k, v, mask=mask, layout=layout, sinks=sinks)

    out = (torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run)(*qkv, sinks)
    assert isinstance(out, DTensor)
    (dsinks,) = torch.autograd.grad(out, sinks, dout)
    assert list(dsinks.placements) == [Partial(), Partial(), heads]
    leaf = random(9, *shape).requires_grad_()
    q, k, v, up = full_tensors(16)
    (reference,) = torch.autograd.grad(reference_attention(q, k, v, mask=mask, sinks=leaf), leaf, up)
    return relative_error(dsinks.full_tensor(), reference)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)], ids=["eager", "in one graph"])
def test_sinks(worlds, compiled):
    assert all(max(errors) <= EXACT for errors in worlds(4 if compiled else 8).run(with_sinks, compiled))


def axis_names() -> list[list[str]]:
    built = mesh(ring=2, ulysses=2)
    return [[axis.name for axis in build(name, built).axes] for name in ("local", "ring", "ulysses", "usp")]


def test_axes_of_a_method_are_outermost_first(worlds):
    assert worlds(4).run(axis_names)[0] == [[], ["ring"], ["ulysses"], ["ring", "ulysses"]]


PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(2), Partial())


def every_placement() -> dict[str, dict[tuple[Placement, ...], str]]:
    """Errors of attention (q, k, v) and of projected attention (x) by placements over ring x tp; "" if accepted."""
    built = mesh(ring=2, tp=2)
    over, attend = built["ring", "tp"], Ring(built["ring"])
    layout, mask = attend.layout(8, kind="contiguous"), AttentionMask()
    messages: dict[str, dict[tuple[Placement, ...], str]] = {"q": {}, "x": {}}
    for placed in product(PLACEMENTS, repeat=2):
        q, x = (place(random(0, *shape), over, placed) for shape in ((B, 8, 4, D), (B, 8, 4)))
        calls = {
            "q": lambda q=q: attend(q, q, q, mask=mask, layout=layout),
            "x": lambda x=x: attend.projected(x, Same(), mask=mask, layout=layout),
        }
        for name, call in calls.items():
            with CommLedger() as ledger:
                messages[name][placed] = refusal_of(call)
            assert not messages[name][placed] or ledger.bytes() == 0
    return messages


class Same:
    """Projections that split x without weights."""

    heads = key_heads = 1

    def q(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        return x.unsqueeze(2)

    def kv(self, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        return x.unsqueeze(2), x.unsqueeze(2)

    def parameters(self) -> list[Tensor]:
        return []


def refusal_of(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def test_every_placement_is_accepted_or_refused_with_the_expected_one(worlds):
    placements = {"q": (Shard(0), Shard(2), Replicate()), "x": (Shard(0), Replicate())}
    for rank in worlds(4).run(every_placement):
        for name, of_pairs in rank.items():
            for (on_ring, on_tp), messages in of_pairs.items():
                expected = placements[name] if on_ring == TOKENS else (Shard(1),)
                accepted = on_ring == TOKENS and on_tp in placements[name]
                named = f"{name} is" in messages and all(repr(placement) in messages for placement in expected)
                assert (messages == "") == accepted and (accepted or named), (on_ring, on_tp)
