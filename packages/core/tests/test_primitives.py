"""The differentiable primitives against one process with all data, in float64; then DTensors against both."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from armillary.core import (
    Axis,
    CommLedger,
    LogSumExpPartial,
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
from armillary.core.parts import dtensor
from armillary.core.testing import mesh, relative_error

EXACT = 1e-12
B, H, D = 2, 6, 4
SIZES = {"even": (3, 3, 3, 3), "uneven": (5, 1, 4, 2), "empty": (4, 0, 3, 2)}
HEADS = {
    "even": [range(2), range(2, 3), range(3, 5), range(5, 6)],
    "shared": [range(3), range(3), range(3, 6), range(3, 6)],
    "overlapping": [range(2), range(1, 4), range(3, 6), range(5, 6)],
    "none for one": [range(2), range(2, 4), range(4, 6), range(6, 6)],
}


@contextmanager
def poisoned() -> Generator[None]:
    """Makes `torch.empty` return NaN."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers that are equal on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def split(x: Tensor, sizes: tuple[int, ...], rank: int, dim: int = 1) -> Tensor:
    return x.split(list(sizes), dim)[rank].clone()


def errors(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    return [relative_error(a.detach(), b.detach()) for a, b in zip(got, expected, strict=True)]


def each(function: Callable, todo: list[tuple]) -> list:
    return [function(*arguments) for arguments in todo]


# -- each against one process -----------------------------------------------------------------------------------------


def turned(sizes: tuple[int, ...], heads: list[range]) -> tuple[list[float], int, int]:
    """Runs seq_to_head, then head_to_seq; returns errors, and bytes of seq_to_head's forward and backward."""
    axis = mesh(ulysses=4)["ulysses"]
    rank, own_heads = axis.get_local_rank(), heads[axis.get_local_rank()]
    full = random(0, B, sum(sizes), H, D).requires_grad_()
    x = split(full.detach(), sizes, rank).requires_grad_()
    ups = [random(1 + r, B, sum(sizes), len(part), D) for r, part in enumerate(heads)]
    with poisoned(), CommLedger() as ledger:
        y = seq_to_head(x, axis, sizes=sizes, heads=heads)
        (dx,) = torch.autograd.grad(y, x, ups[rank])
    pieces = [full[:, :, part.start : part.stop] for part in heads]
    (expected,) = torch.autograd.grad(pieces, full, ups)
    actual = errors((y, dx), (pieces[rank], split(expected, sizes, rank)))

    z = [random(10 + r, B, sum(sizes), len(part), D).requires_grad_() for r, part in enumerate(heads)]
    local, up = z[rank].detach().requires_grad_(), random(20, B, sum(sizes), H, D)
    with poisoned():
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
    with poisoned(), CommLedger() as ledger:
        y = all_gather(x, axis, sizes=sizes, dim=dim)
        (dx,) = torch.autograd.grad(y, x, ups[rank])
    actual = errors((y, dx), (full, split(sum(ups), sizes, rank, dim)))

    parts = [random(10 + r, *shape) for r in range(4)]
    local, up = parts[rank].clone().requires_grad_(), random(20, *shape)
    with poisoned(), CommLedger() as second:
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
    with CommLedger() as ledger:
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


def partials(sizes: tuple[int, ...], batch: int, dtype: torch.dtype, shift: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    """Partial attention of four ranks. Row 0 has no visible key on any rank; each rank has more such rows."""
    results: list[tuple[Tensor, Tensor]] = []
    for rank in range(4):
        out, lse = random(rank, batch, sum(sizes), H, D), random(50 + rank, batch, sum(sizes), H) * 3 + shift
        blind = random(90 + rank, *lse.shape) > 0.5
        blind[:, 0], blind[:, 1] = True, rank != 2
        out = out.masked_fill(blind.unsqueeze(-1), 0).to(dtype)
        results.append((out, lse.masked_fill(blind, -torch.inf).to(torch.promote_types(dtype, torch.float32))))
    return results


def merged_by_softmax(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges by a softmax over the ranks, without pairwise log-sum-exp and without a pivot."""
    outs, lses = torch.stack([out for out, _ in parts]).double(), torch.stack([lse for _, lse in parts]).double()
    visible = (lses > -torch.inf).any(0)
    safe = torch.where(visible, lses, 0)
    weights = torch.where(visible, safe.softmax(0), 0)
    return (weights.unsqueeze(-1) * outs).sum(0), torch.where(visible, safe.logsumexp(0), -torch.inf)


def merged(sizes: tuple[int, ...], batch: int, dtype: torch.dtype, shift: float) -> tuple[list[float], int, int]:
    axis = mesh(ring=4)["ring"]
    rank = axis.get_local_rank()
    parts = partials(sizes, batch, dtype, shift)
    ups = random(100, *parts[0][0].shape).to(dtype), random(101, *parts[0][1].shape).to(parts[0][1].dtype)
    local = [x.clone().requires_grad_() for x in parts[rank]]
    with poisoned(), CommLedger() as ledger:
        out, lse = merge_scatter(local[0], local[1], axis, sizes=sizes)
        grads = torch.autograd.grad((out, lse), local, [split(up, sizes, rank) for up in ups])
    assert (out.dtype, lse.dtype) == tuple(x.dtype for x in parts[rank]) == tuple(g.dtype for g in grads)

    leaves = [(a.double().requires_grad_(), b.double().requires_grad_()) for a, b in parts]
    whole_out, whole_lse = merged_by_softmax(leaves)
    visible = whole_lse > -torch.inf
    expected = torch.autograd.grad(
        (whole_out, torch.where(visible, whole_lse, 0)), leaves[rank], [up.double() for up in ups]
    )
    assert torch.equal(lse == -torch.inf, ~split(visible, sizes, rank))
    actual = errors(
        (out, lse.masked_fill(lse == -torch.inf, 0), *grads),
        (split(whole_out, sizes, rank), split(torch.where(visible, whole_lse, 0), sizes, rank), *expected),
    )
    return actual, ledger.bytes("ring", "reduce_scatter", "forward"), ledger.bytes("ring", "all_gather", "backward")


def test_merge_and_its_gradients(worlds):
    shifts = (0.0, 2000.0, -2000.0)  # exp(2000) overflows and exp(-2000) underflows
    todo = list(product(SIZES.values(), (1, 2), (torch.float64,), shifts))
    for (tokens, batch, _, shift), *ranks in zip(todo, *worlds(4).run(each, merged, todo), strict=True):
        for rank, (actual, forward, backward) in enumerate(ranks):
            assert max(actual) <= (1e-11 if shift else EXACT), (tokens, batch, shift, actual)
            assert forward == batch * (sum(tokens) - tokens[rank]) * H * (D * 8 + 8)
            assert backward == 3 * batch * max(tokens) * H * (D * 8 + 16)


def test_merge_in_bfloat16_rounds_once_and_sends_lse_wide(worlds):
    for actual, forward, backward in worlds(4).run(merged, SIZES["even"], 2, torch.bfloat16, 0.0):
        assert max(actual) <= 2**-8
        assert actual[1] <= 1e-6
        assert (forward, backward) == (3 * 2 * 3 * H * (D * 2 + 4), 3 * 2 * 3 * H * (D * 2 + 8))


def sums_in_order() -> bool:
    """Sums 1 + 2**-8 + 2**-8 + 2**-8 in bfloat16: rounded after each addition it would stay 1."""
    axis = mesh(ring=4)["ring"]
    x = torch.full((1, 4, 2), 1.0 if axis.get_local_rank() == 0 else 2.0**-8, dtype=torch.bfloat16)
    result = start_reduce_scatter(x, Axis.of(axis), (1, 1, 1, 1)).wait()
    return torch.equal(result, torch.full((1, 1, 2), 1 + 3 * 2.0**-8, dtype=torch.bfloat16).view_as(result))


def test_sums_are_taken_in_float32(worlds):
    assert worlds(4).run(sums_in_order) == [True] * 4


def sums_of_a_few_columns() -> list[bool]:
    """Compares the bits of columns with those in a wider tensor, by `reduce_scatter` and by torch's `sum`."""
    axis = Axis.of(mesh(ring=8)["ring"])
    wholes = torch.stack([random(rank, 2, 24, 125).float() for rank in range(8)])
    wide = start_reduce_scatter(wholes[axis.rank], axis, (3,) * 8).wait()
    few = start_reduce_scatter(wholes[axis.rank, ..., :7].contiguous(), axis, (3,) * 8).wait()
    return [torch.equal(few, wide[..., :7]), torch.equal(wholes[..., :7].contiguous().sum(0), wholes.sum(0)[..., :7])]


def test_sums_have_the_same_bits_in_tensors_of_other_shapes(worlds):
    assert worlds(8).run(sums_of_a_few_columns) == [[True, False]] * 8


def scatter_parts(sizes: tuple[int, ...], dim: int) -> tuple[bool, int]:
    axis = Axis.of(mesh(ring=4)["ring"])
    wholes = [random(rank, *(3, sum(sizes), 2)[1 - dim :]) for rank in range(4)]
    with CommLedger() as ledger:
        result = start_scatter_parts(wholes[axis.rank], axis, sizes, dim).wait()
    expected = [split(full, sizes, axis.rank, dim) for full in wholes]
    return all(torch.equal(g, e) for g, e in zip(result, expected, strict=True)), ledger.bytes("ring", "reduce_scatter")


def test_parts_of_a_sum_arrive_in_rank_order(worlds):
    todo = list(product(SIZES.values(), (0, 1)))
    for (tokens, dim), *ranks in zip(todo, *worlds(4).run(each, scatter_parts, todo), strict=True):
        for rank, (equal, sent_bytes) in enumerate(ranks):
            assert equal, (tokens, dim)
            assert sent_bytes == (sum(tokens) - tokens[rank]) * (3 if dim else 1) * 2 * 8


def starts_wait_twice() -> bool:
    axis = Axis.of(mesh(ring=4)["ring"])
    sizes = SIZES["uneven"]
    out, lse = partials(sizes, 2, torch.float64)[axis.rank]
    x = split(out, sizes, axis.rank)
    moving = start_all_gather(x, axis, sizes), start_reduce_scatter(out, axis, sizes)
    merging = start_merge_scatter(out, lse, axis, sizes)
    first = [*(move.wait() for move in moving), *merging.wait()]
    second = [*(move.wait() for move in moving), *merging.wait()]
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_second_wait_returns_the_same_tensor(worlds):
    assert worlds(4).run(starts_wait_twice) == [True] * 4


def defaults() -> bool:
    """The defaults are equal sizes, and heads as torch.tensor_split cuts them."""
    axis = mesh(ulysses=4)["ulysses"]
    rank = axis.get_local_rank()
    full = random(0, B, 8, 7, D)
    x = split(full, (2,) * 4, rank)
    heads = seq_to_head(x, axis)
    right = torch.equal(heads, full.tensor_split(4, dim=2)[rank])
    even = seq_to_head(x[:, :, :4], axis)
    right &= torch.equal(head_to_seq(even, axis), x[:, :, :4])
    right &= torch.equal(all_gather(x, axis), full)
    return right and torch.equal(reduce_scatter(full, axis), 4 * x)


def test_defaults(worlds):
    assert worlds(4).run(defaults) == [True] * 4


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


def on_inner_axis() -> list[float]:
    """Runs on the ulysses axis of a 2 x 2 x 2 mesh; each of its four groups has other data."""
    whole_mesh = mesh(ring=2, ulysses=2, tp=2)
    axis = whole_mesh["ulysses"]
    rank, group = axis.get_local_rank(), 2 * whole_mesh.get_local_rank("ring") + whole_mesh.get_local_rank("tp")
    sizes = (3, 1 + group)
    full = random(group, B, sum(sizes), H, D).requires_grad_()
    x = split(full.detach(), sizes, rank).requires_grad_()
    y = seq_to_head(x, axis, sizes=sizes)
    z = all_gather(x, axis, sizes=sizes)
    ups = [random(9 + r, *y.shape) for r in range(2)], [random(11 + r, *z.shape) for r in range(2)]
    (dx,) = torch.autograd.grad((y, z), x, (ups[0][rank], ups[1][rank]))
    expected = torch.cat(ups[0], dim=2) + sum(ups[1])
    return errors((y, z, dx), (full.tensor_split(2, 2)[rank], full, split(expected, sizes, rank)))


def test_on_one_axis_of_a_larger_mesh(worlds):
    assert all(max(actual) <= EXACT for actual in worlds(8).run(on_inner_axis))


def twice() -> tuple[bool, ...]:
    """Checks second derivatives of the linear primitives by torch's gradgradcheck; the merge refuses them."""
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


# -- DTensors ---------------------------------------------------------------------------------------------------------


def turns_dtensors(length: int, heads: int) -> list[float]:
    """On one axis, all-to-all equals DTensor's redistribution, and so do its gradients."""
    built = mesh(ulysses=4)["ulysses"]
    full = distribute_tensor(random(0, B, length, heads, D), built, [Shard(1)]).requires_grad_()
    up = distribute_tensor(random(1, B, length, heads, D), built, [Shard(2)])
    with poisoned(), CommLedger() as ledger:
        turned = seq_to_head(full, built)
        back = head_to_seq(turned, built)
        (grad,) = torch.autograd.grad(turned, full, up, retain_graph=True)
        (grad_back,) = torch.autograd.grad(back, turned, up.redistribute(placements=[Shard(1)]))
    assert turned.placements == grad_back.placements == (Shard(2),)
    assert back.placements == grad.placements == (Shard(1),)
    assert turned.shape == back.shape == full.shape
    assert ledger.bytes(kind="all_to_all") == ledger.bytes()
    pairs = [(turned, full.redistribute(placements=[Shard(2)])), (back, full), (grad, up), (grad_back, up)]
    for result, expected in pairs:
        assert result.to_local().shape == expected.redistribute(placements=result.placements).to_local().shape
    return errors(
        tuple(result.full_tensor() for result, _ in pairs), tuple(expected.full_tensor() for _, expected in pairs)
    )


def test_all_to_all_of_dtensors_equals_redistribute(worlds):
    for rank in worlds(4).run(each, turns_dtensors, [(8, 8), (11, 6), (9, 5)]):
        assert [max(actual) for actual in rank] == [0.0] * 3


PLACED = [Shard(1), Shard(1), Shard(2)]


def dtensors_like_local() -> list[float]:
    """On tp 2 x ring 2 x ulysses 2, DTensors with explicit placements equal local tensors, gradients too."""
    whole_mesh = mesh(ring=2, ulysses=2, tp=2)
    three, axis = whole_mesh["ring", "ulysses", "tp"], whole_mesh["ulysses"]
    x = distribute_tensor(random(0, B, 12, 8, D), three, PLACED).requires_grad_()
    local = x.to_local().detach().requires_grad_()
    turned, plain = seq_to_head(x, axis), seq_to_head(local, axis)
    back = head_to_seq(turned * 2, axis)
    plain_back = head_to_seq(plain * 2, axis)
    assert turned.placements == (Shard(1), Shard(2), Shard(2))
    assert list(back.placements) == PLACED
    up = distribute_tensor(random(1, B, 12, 8, D), three, PLACED)
    (grad,) = torch.autograd.grad(back, x, up)
    (plain_grad,) = torch.autograd.grad(plain_back, local, up.to_local())
    assert list(grad.placements) == PLACED
    result = turned.to_local(), back.to_local(), grad.to_local()
    actual = errors(result, (plain, plain_back, plain_grad))
    return actual + errors((back.full_tensor(), grad.full_tensor()), (2 * x.full_tensor(), 2 * up.full_tensor()))


def test_dtensors_on_three_axes(worlds):
    assert all(max(actual) == 0.0 for actual in worlds(8).run(dtensors_like_local))


def gathers_dtensors(length: int) -> list[float]:
    """The gradient of a gathered tensor may be replicated or partial: both are right."""
    whole_mesh = mesh(ring=2, ulysses=2, tp=2)
    three, axis = whole_mesh["ring", "ulysses", "tp"], whole_mesh["ulysses"]
    x = distribute_tensor(random(0, B, length, 8, D), three, PLACED).requires_grad_()
    y = all_gather(x, axis)
    placed = (Shard(1), Replicate(), Shard(2))
    assert y.placements == placed
    expected = distribute_tensor(random(0, B, length, 8, D), three, placed)

    up = random(1, B, length, 8, D)
    with CommLedger() as ledger:
        (grad,) = torch.autograd.grad(y, x, distribute_tensor(up, three, placed), retain_graph=True)
    assert ledger.bytes() == 0
    partial_grad = random(2 + axis.get_local_rank(), *y.to_local().shape)
    total_grad = sum(random(2 + r, *partial_grad.shape) for r in range(2))
    partial = [Shard(1), Partial(), Shard(2)]
    with CommLedger() as ledger:
        (summed,) = torch.autograd.grad(y.to_local(grad_placements=partial), x, partial_grad)
    assert ledger.bytes(kind="reduce_scatter", phase="backward") == ledger.bytes() > 0
    assert list(grad.placements) == list(summed.placements) == PLACED
    rank = axis.get_local_rank()
    sizes = dtensor.chunk_sizes(partial_grad.shape[1], 2)

    parts = DTensor.from_local(partial_grad, three, partial, shape=x.shape, stride=x.stride()).requires_grad_()
    scattered = reduce_scatter(parts, axis)
    (spread,) = torch.autograd.grad(scattered, parts, distribute_tensor(up, three, PLACED))
    assert list(scattered.placements) == PLACED
    assert spread.placements == placed
    result = y.to_local(), grad.full_tensor(), summed.to_local(), scattered.to_local(), spread.full_tensor()
    return errors(result, (expected.to_local(), up, split(total_grad, sizes, rank), split(total_grad, sizes, rank), up))


def test_gathering_dtensors(worlds):
    for rank in worlds(8).run(each, gathers_dtensors, [(12,), (11,)]):
        assert all(max(actual) <= EXACT for actual in rank)


def merges_dtensors() -> list[float]:
    whole_mesh = mesh(ring=4, tp=2)
    two, axis = whole_mesh["ring", "tp"], whole_mesh["ring"]
    out, lse = partials((12,), 2, torch.float64)[axis.get_local_rank()]
    heads = slice(3 * two.get_local_rank("tp"), 3 * two.get_local_rank("tp") + 3)
    local = [x[:, :, heads].clone().requires_grad_() for x in (out, lse)]
    placed = [LogSumExpPartial(packed=False), Shard(2)]
    parts = [DTensor.from_local(x, two, placed) for x in local]
    results = merge_scatter(parts[0], parts[1], axis)
    plain = merge_scatter(local[0], local[1], axis)
    assert all(x.placements == (Shard(1), Shard(2)) for x in results)
    assert (results[0].shape, results[1].shape) == ((2, 12, H, D), (2, 12, H))
    ups = [random(7 + i, *x.shape) for i, x in enumerate(plain)]
    grads = torch.autograd.grad([x.to_local() for x in results], local, ups)
    expected = torch.autograd.grad(plain, local, ups)
    finite = [x.nan_to_num(neginf=0) for x in (results[1].to_local(), plain[1])]
    return errors((results[0].to_local(), finite[0], *grads), (plain[0], finite[1], *expected))


def test_merging_dtensors(worlds):
    assert all(max(actual) == 0.0 for actual in worlds(8).run(merges_dtensors))
