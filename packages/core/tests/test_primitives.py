"""The differentiable primitives against one process with all data, in float64."""

from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from core_cases import counted, each, merged_by_softmax, partial, random
from torch import Tensor

from armillary.core import (
    Axis,
    CommLedger,
    all_gather,
    all_reduce,
    head_to_seq,
    merge_scatter,
    reduce_scatter,
    seq_to_head,
    start_all_gather,
    start_merge_scatter,
    start_reduce_scatter,
    start_scatter_parts,
)
from armillary.core.testing import Dispatched, mesh, relative_error

EXACT = 1e-12
B, H, D = 2, 6, 4
SIZES = {"even": (3, 3, 3, 3), "uneven": (5, 1, 4, 2), "empty": (4, 0, 3, 2)}
HEADS = {
    "even": [range(2), range(2, 3), range(3, 5), range(5, 6)],
    "shared": [range(3), range(3), range(3, 6), range(3, 6)],
    "overlapping": [range(2), range(1, 4), range(3, 6), range(5, 6)],
    "none for one": [range(2), range(2, 4), range(4, 6), range(6, 6)],
}


def split(x: Tensor, sizes: tuple[int, ...], rank: int, dim: int = 1) -> Tensor:
    return x.split(list(sizes), dim)[rank].clone()


def errors(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    return [relative_error(a.detach(), b.detach()) for a, b in zip(got, expected, strict=True)]


def turned(sizes: tuple[int, ...], heads: list[range]) -> tuple[list[float], int, int]:
    """Runs seq_to_head, then head_to_seq; returns errors, and bytes of seq_to_head's forward and backward."""
    axis = mesh(ulysses=4)["ulysses"]
    rank, own_heads = axis.get_local_rank(), heads[axis.get_local_rank()]
    full = random(0, B, sum(sizes), H, D).requires_grad_()
    x = split(full.detach(), sizes, rank).requires_grad_()
    ups = [random(1 + r, B, sum(sizes), len(part), D) for r, part in enumerate(heads)]
    with counted() as ledger:
        y = seq_to_head(x, axis, sizes=sizes, heads=heads)
        (dx,) = torch.autograd.grad(y, x, ups[rank])
    pieces = [full[:, :, part.start : part.stop] for part in heads]
    (expected,) = torch.autograd.grad(pieces, full, ups)
    actual = errors((y, dx), (pieces[rank], split(expected, sizes, rank)))

    z = [random(10 + r, B, sum(sizes), len(part), D).requires_grad_() for r, part in enumerate(heads)]
    local, up = z[rank].detach().requires_grad_(), random(20, B, sum(sizes), H, D)
    with counted():
        back = head_to_seq(local, axis, sizes=sizes, heads=heads)
        (dz,) = torch.autograd.grad(back, local, split(up, sizes, rank))
    padded = [torch.nn.functional.pad(a, (0, 0, p.start, H - p.stop)) for a, p in zip(z, heads, strict=True)]
    total = torch.stack(padded).sum(0)
    actual += errors((back, dz), (split(total, sizes, rank), torch.autograd.grad(total, z, up)[rank]))
    assert len(own_heads) == y.shape[2]
    return actual, ledger.bytes(kind="all_to_all", phase="forward"), ledger.bytes(kind="all_to_all", phase="backward")


def test_all_to_all_and_its_gradient(worlds):
    todo = list(product(SIZES.values(), HEADS.values()))
    for (tokens, ranges), *ranks in zip(todo, *worlds(4).run(each, turned, todo), strict=True):
        for rank, (actual, forward, backward) in enumerate(ranks):
            assert max(actual) <= EXACT, (tokens, ranges, actual)
            assert forward == B * tokens[rank] * sum(len(p) for r, p in enumerate(ranges) if r != rank) * D * 8
            assert backward == B * (sum(tokens) - tokens[rank]) * len(ranges[rank]) * D * 8


def gathered(sizes: tuple[int, ...], dim: int, batch: int) -> tuple[list[float], int, int, int, int]:
    axis = mesh(ring=4)["ring"]
    rank = axis.get_local_rank()
    shape = [batch, 5, 3]
    shape[dim] = sum(sizes)
    full, ups = random(0, *shape).requires_grad_(), [random(1 + r, *shape) for r in range(4)]
    x = split(full.detach(), sizes, rank, dim).requires_grad_()
    with counted() as ledger:
        y = all_gather(x, axis, sizes=sizes, dim=dim)
        (dx,) = torch.autograd.grad(y, x, ups[rank])
    actual = errors((y, dx), (full, split(sum(ups), sizes, rank, dim)))

    parts = [random(10 + r, *shape) for r in range(4)]
    local, up = parts[rank].clone().requires_grad_(), random(20, *shape)
    with counted() as second:
        z = reduce_scatter(local, axis, sizes=sizes, dim=dim)
        (dz,) = torch.autograd.grad(z, local, split(up, sizes, rank, dim))
    actual += errors((z, dz), (split(sum(parts), sizes, rank, dim), up))
    kinds = [(ledger, "all_gather", "forward"), (ledger, "reduce_scatter", "backward")]
    kinds += [(second, "reduce_scatter", "forward"), (second, "all_gather", "backward")]
    assert ledger.bytes() + second.bytes() == sum(each.bytes(kind=k, phase=p) for each, k, p in kinds)
    return actual, *(each.bytes("ring", k, p) for each, k, p in kinds)


def test_gather_and_its_transpose(worlds):
    todo = [(tokens, *dim_and_batch) for tokens in SIZES.values() for dim_and_batch in ((1, 2), (1, 1), (0, 7), (2, 2))]
    for (tokens, dim, batch), *ranks in zip(todo, *worlds(4).run(each, gathered, todo), strict=True):
        row = batch * 5 * 3 // [batch, 5, 3][dim] * 8  # bytes of one token
        for rank, (actual, *sent_bytes) in enumerate(ranks):
            assert max(actual) <= EXACT, (tokens, dim, batch, actual)
            gather, scatter = 3 * max(tokens) * row, (sum(tokens) - tokens[rank]) * row
            assert sent_bytes == [gather, scatter, scatter, gather]


def reduced(shape: tuple[int, ...]) -> tuple[list[float], Tensor, int, int]:
    axis = Axis.of(mesh(ring=4)["ring"])
    addends, douts = ([random(10 * seed + rank, *shape) for rank in range(axis.size)] for seed in (1, 2))
    x = addends[axis.rank].requires_grad_()
    with counted() as ledger:
        total = all_reduce(x, axis)
        (gradient,) = torch.autograd.grad(total, x, douts[axis.rank])
    sent_bytes = [ledger.bytes("ring", "all_reduce", phase) for phase in ("forward", "backward")]
    assert sum(sent_bytes) == ledger.bytes()
    return errors((total, gradient), (sum(addends), sum(douts))), total.detach(), *sent_bytes


def test_all_reduce_and_its_gradient(worlds):
    for shape in ((), (3, 5)):
        answers = worlds(4).run(reduced, shape)
        for wrong, total, forward, backward in answers:
            assert max(wrong) < 1e-14
            assert torch.equal(total, answers[0][1])
            assert forward == backward == 2 * 3 * 8 * total.numel() // 4


def merged(sizes: tuple[int, ...], batch: int, dtype: torch.dtype, shift: float) -> tuple[list[float], int, int]:
    axis = mesh(ring=4)["ring"]
    rank = axis.get_local_rank()
    parts = [partial(rank, sum(sizes), dtype, batch, shift) for rank in range(4)]
    ups = random(100, *parts[0][0].shape).to(dtype), random(101, *parts[0][1].shape).to(parts[0][1].dtype)
    local = [x.clone().requires_grad_() for x in parts[rank]]
    with counted() as ledger:
        out, lse = merge_scatter(local[0], local[1], axis, sizes=sizes)
        grads = torch.autograd.grad((out, lse), local, [split(up, sizes, rank) for up in ups])
    assert (out.dtype, lse.dtype) == tuple(x.dtype for x in parts[rank]) == tuple(g.dtype for g in grads)

    leaves = [(a.double().requires_grad_(), b.double().requires_grad_()) for a, b in parts]
    full_out, full_lse = merged_by_softmax(leaves)
    finite_lse = torch.where(full_lse > -torch.inf, full_lse, 0)
    expected = torch.autograd.grad((full_out, finite_lse), leaves[rank], [up.double() for up in ups])
    actual = errors((out, lse, *grads), (split(full_out, sizes, rank), split(full_lse, sizes, rank), *expected))
    return actual, ledger.bytes("ring", "reduce_scatter", "forward"), ledger.bytes("ring", "all_gather", "backward")


def test_merge_and_its_gradients(worlds):
    shifts = (0.0, 2000.0, -2000.0)  # exp(2000) overflows and exp(-2000) underflows
    todo = [*product(SIZES.values(), (1, 2), (torch.float64,), shifts), (SIZES["even"], 2, torch.bfloat16, 0.0)]
    for (tokens, batch, dtype, shift), *ranks in zip(todo, *worlds(4).run(each, merged, todo), strict=True):
        size, wide = dtype.itemsize, max(dtype.itemsize, 4)  # bytes of out, and of lse
        for rank, (actual, forward, backward) in enumerate(ranks):
            if dtype == torch.float64:
                assert max(actual) <= (1e-11 if shift else EXACT), (tokens, batch, shift, actual)
            else:  # results are rounded once, and lse is not
                assert max(actual) <= 2**-8 and actual[1] <= 1e-6
            assert forward == batch * (sum(tokens) - tokens[rank]) * H * (D * size + wide)
            assert backward == 3 * batch * max(tokens) * H * (D * size + 2 * wide)


def sums_of_a_few_columns() -> list[bool]:
    """Compares the bits of columns with those in a wider tensor, by `reduce_scatter` and by torch's `sum`."""
    axis = Axis.of(mesh(ring=8)["ring"])
    wholes = torch.stack([random(rank, 2, 24, 125).float() for rank in range(8)])
    wide = start_reduce_scatter(wholes[axis.rank], axis, (3,) * 8).wait()
    few = start_reduce_scatter(wholes[axis.rank, ..., :7].contiguous(), axis, (3,) * 8).wait()
    return [torch.equal(few, wide[..., :7]), torch.equal(wholes[..., :7].contiguous().sum(0), wholes.sum(0)[..., :7])]


def test_sums_have_the_same_bits_in_tensors_of_other_shapes(worlds):
    assert worlds(8).run(sums_of_a_few_columns) == [[True, False]] * 8


def single_calls() -> dict[str, bool]:
    axis = Axis.of(mesh(ring=4)["ring"])
    result: dict[str, bool] = {}
    # 1 + 2**-8 + 2**-8 + 2**-8 in bfloat16: rounded after each addition it would stay 1.
    x = torch.full((1, 4, 2), 2.0**-8 if axis.rank else 1.0, dtype=torch.bfloat16)
    rounded_once = torch.full((1, 1, 2), 1 + 3 * 2.0**-8, dtype=torch.bfloat16)
    result["sums are taken in float32"] = torch.equal(reduce_scatter(x, axis), rounded_once)

    wholes = [random(rank, 2, 12, 3) for rank in range(4)]
    parts = start_scatter_parts(wholes[axis.rank], axis, SIZES["uneven"]).wait()
    sent = [split(full, SIZES["uneven"], axis.rank) for full in wholes]
    result["parts arrive in rank order"] = all(map(torch.equal, parts, sent))

    out, lse = partial(axis.rank, 12)
    moving = [start_merge_scatter(out, lse, axis, SIZES["uneven"])]
    moving += [start_reduce_scatter(out, axis, SIZES["uneven"])]
    moving += [start_all_gather(split(out, SIZES["uneven"], axis.rank), axis, SIZES["uneven"])]
    first, second = ([torch.cat([y.flatten() for y in move.wait()]) for move in moving] for _ in range(2))
    result["a second wait returns the same"] = all(map(torch.equal, first, second))

    full = random(0, B, 8, 7, D)
    x, even = split(full, (2,) * 4, axis.rank), split(full, (2,) * 4, axis.rank)[:, :, :4]
    result["default heads"] = torch.equal(seq_to_head(x, axis), full.tensor_split(4, dim=2)[axis.rank])
    result["default heads back"] = torch.equal(head_to_seq(seq_to_head(even, axis), axis), even)
    result["default gather"] = torch.equal(all_gather(x, axis), full)
    result["default sum"] = torch.equal(reduce_scatter(full, axis), 4 * x)
    return result


def test_sums_parts_waits_and_defaults(worlds):
    for checks in worlds(4).run(single_calls):
        assert all(checks.values()), checks


def ops_of_graphs() -> bool:
    """Compares the ops of compiled graphs with eager calls."""
    axis, results = Axis.of(mesh(ring=4)["ring"]), []
    # torch.compile traces nothing under a dispatch mode, so the ops that it would put into a graph are called directly.
    for in_graph in (True, False):
        x, full = random(axis.rank, B, 3, D).requires_grad_(), random(9 + axis.rank, B, 12).requires_grad_()
        with counted() as ledger:
            with patch.object(torch.compiler, "is_compiling", return_value=in_graph):
                calls = all_gather(x, axis), reduce_scatter(full, axis)
            grads = torch.autograd.grad(calls, (x, full), [random(20 + axis.rank, *y.shape) for y in calls])
        results.append((ledger.entries, *calls, *grads))
    (traced_bytes, *traced), (eager_bytes, *eager) = results
    return traced_bytes == eager_bytes and all(map(torch.equal, traced, eager))


def test_ops_of_graphs_equal_eager_calls(worlds):
    assert worlds(4).run(ops_of_graphs) == [True] * 4


def sent_outside_the_ledger() -> tuple[dict, bool]:
    with Dispatched() as dispatched, CommLedger() as ledger:
        dist.all_reduce(torch.ones(3))
    return dispatched.sent, Dispatched.of(ledger) == {}


def test_the_dispatcher_sees_traffic_outside_the_ledger(worlds):
    assert worlds(4).run(sent_outside_the_ledger) == [({"all_reduce": (18, 6)}, True)] * 4


def alone() -> tuple[bool, int]:
    axis = mesh()["ring"]
    out, lse = random(0, B, 5, H, D).requires_grad_(), random(1, B, 5, H).requires_grad_()
    with CommLedger() as ledger:
        same = [f(out, axis) for f in (seq_to_head, head_to_seq, all_gather, reduce_scatter)]
        same.append(merge_scatter(out, lse, axis)[0])
        grads = [torch.autograd.grad(y, out, torch.ones_like(y))[0] for y in same]
    right = all(torch.equal(y, out) for y in same) and all(torch.equal(g, torch.ones_like(g)) for g in grads)
    return right and torch.equal(merge_scatter(out, lse, axis)[1], lse), ledger.bytes()


def test_one_rank_communicates_nothing(worlds):
    assert worlds(1).run(alone) == [(True, 0)]


def twice() -> tuple[bool, ...]:
    """Checks second derivatives of a linear primitive; the merge refuses them."""
    axis = mesh(ring=2)["ring"]
    x, y = random(0, 1, 2, 2, 2).requires_grad_(), random(1, 1, 4, 2, 2)
    cubes = all_gather(x, axis).pow(3).sum()
    (first,) = torch.autograd.grad(cubes, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    out, lse = merge_scatter(y.requires_grad_(), random(2, 1, 4, 2).requires_grad_(), axis)
    (grad,) = torch.autograd.grad(out.pow(2).sum() + lse.sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    return torch.allclose(first, 6 * x**2), torch.allclose(second, 12 * x)


def test_second_derivatives_are_right_or_refused(worlds):
    assert worlds(2).run(twice) == [(True, True)] * 2
