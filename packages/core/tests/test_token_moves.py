"""Relayout, shift, halo and short convolution against the same on the full sequence, in worlds of gloo ranks."""

from itertools import pairwise, product

import pytest
import torch
from core_cases import paths
from torch.distributed.tensor import DTensor, Shard

from armillary.core import Axis, CommLedger, Segments, SequenceLayout, halo, relayout, shift, short_convolution
from armillary.core.testing import mesh

N = 37


class Tree:
    """A mask with given segments."""

    def __init__(self, *rows: Segments) -> None:
        self.rows = rows

    def segments(self, length: int) -> tuple[Segments, ...]:
        return self.rows


TREE = Segments((0, 5, 6, 14, 20, 21, 30, 37), (-1, 0, 1, 0, -1, 4, 4))
ROWS = {
    "none": {},
    "documents": {"documents": [0, 1, 3, 17, 37]},
    "rows": {"documents": [[0, 4, 37], [0, 20, 21, 37]]},
    "tree": {"mask": Tree(TREE)},
    "trees": {"mask": Tree(TREE, Segments.documents((0, 11, 37)))},
}


def layouts(shards: int) -> dict[str, SequenceLayout]:
    uneven = [range(r, N, shards) for r in range(shards)] if shards > 1 else [range(N)]
    ragged = [[] for _ in range(shards)]
    for i, (a, b) in enumerate(pairwise([0, 1, 2, 9, 10, 16, 17, 25, 37] if shards < 5 else range(0, N + 1, 1))):
        ragged[(i * 3 + 1) % shards].append(range(a, b))
    return {
        "contiguous": SequenceLayout.contiguous(N, shards),
        "zigzag": SequenceLayout.zigzag(N, shards),
        "striped": SequenceLayout.striped(N, shards),
        "stripes of 3": SequenceLayout.striped(N, shards, 3),
        "ragged": SequenceLayout(ragged),
        "steps": SequenceLayout([[span] for span in uneven]),
    }


def segments_of(rows: str) -> tuple[Segments, ...]:
    options = ROWS[rows]
    if "mask" in options:
        return options["mask"].rows
    ends = options.get("documents", [0, N])
    return tuple(Segments.documents(e) for e in (ends if isinstance(ends[0], list) else [ends]))


def full_shift(x: torch.Tensor, rows: str, offset: int, fill: float) -> torch.Tensor:
    filling = torch.full_like(x[:1, :1], fill)
    everything = torch.cat([x, filling.expand(2, -1, *x.shape[2:])], 1)
    table = []
    segments = segments_of(rows)
    for row in [paths(each.ends, each.parents) for each in segments * (2 // len(segments))]:
        if offset >= 0:
            table.append([path[-1 - offset] if len(path) > offset else N for path in row])
        else:
            table.append([i - offset if i - offset < N and i in row[i - offset] else N for i in range(N)])
    return torch.stack([everything[row, torch.tensor(table[row])] for row in range(2)])


def full_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, rows: str) -> torch.Tensor:
    width = weight.shape[1]
    return bias + sum(weight[:, width - 1 - back] * full_shift(x, rows, back, 0) for back in range(width))


def sums(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    torch.distributed.all_reduce(x, group=axis.group)
    return x


def compare_all(pairs: list[tuple[str, str]]) -> None:
    for rows, kind in pairs:
        compare_everything(rows, kind)
        compare_halos(rows, kind, 3, 0 if "tree" in rows else 2)


def compare_everything(rows: str, kind: str) -> None:
    ring = mesh(ring=torch.distributed.get_world_size())["ring"]
    axis = Axis.of(ring)
    layout = layouts(axis.size)[kind]
    generator = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(2, N, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    weight, bias = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((3, 4), (3,)))
    local_x = layout.take(x, axis.rank).requires_grad_()
    x.requires_grad_()
    backwards = (-1, -3) if "tree" not in rows else ()
    for offset in (0, 1, 4, N, *backwards):
        expected = full_shift(x, rows, offset, 7.0)
        actual = shift(local_x, layout, ring, offset, fill=7.0, **ROWS[rows])
        assert torch.equal(actual, layout.take(expected, axis.rank))
        grads = torch.autograd.grad(actual, local_x, layout.take(dout, axis.rank))
        torch.testing.assert_close(grads[0], layout.take(torch.autograd.grad(expected, x, dout)[0], axis.rank))
    labels = shift(layout.take(torch.arange(N).expand(2, N), axis.rank), layout, ring, 1, fill=-100, **ROWS[rows])
    assert torch.equal(labels, layout.take(full_shift(torch.arange(N).expand(2, N), rows, 1, -100), axis.rank))

    parameters = weight.requires_grad_(), bias.requires_grad_()
    expected, actual = (
        full_convolution(x, *parameters, rows),
        short_convolution(local_x, parameters[0], layout, ring, parameters[1], **ROWS[rows]),
    )
    torch.testing.assert_close(actual, layout.take(expected, axis.rank))
    full = torch.autograd.grad(expected, (x, *parameters), dout)
    local = torch.autograd.grad(actual, (local_x, *parameters), layout.take(dout, axis.rank))
    torch.testing.assert_close(local[0], layout.take(full[0], axis.rank))
    for local_gradient, gradient in zip(local[1:], full[1:], strict=True):
        torch.testing.assert_close(sums(local_gradient, axis), gradient)


def compare_halos(rows: str, kind: str, left: int, right: int) -> None:
    ring = mesh(ring=torch.distributed.get_world_size())["ring"]
    axis = Axis.of(ring)
    layout = layouts(axis.size)[kind]
    x = torch.arange(1.0, 2 * N + 1).reshape(2, N)
    actual = halo(layout.take(x, axis.rank), layout, ring, left, right, **ROWS[rows])
    shifted = [full_shift(x, rows, offset, 0) for offset in (*range(left, 0, -1), *range(0, -right - 1, -1))]
    segments = segments_of(rows)
    expected = []
    for row, row_segments in enumerate(segments):
        for run in row_segments.runs(layout.spans(axis.rank)):
            tokens = torch.tensor(run)
            before = [y[:, tokens[:1]] for y in shifted[:left]]
            after = [y[:, tokens[-1:]] for y in shifted[left + 1 :]]
            part = torch.cat([*before, x[:, tokens], *after], 1)
            expected.append(part if len(segments) == 1 else part[row : row + 1])
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


PAIRS = list(product(ROWS, layouts(4)))
DIAGONALS = [[(rows, kind) for i, rows in enumerate(ROWS) for j, kind in enumerate(layouts(4)) if (i + j) % 2 == k]
             for k in (0, 1)]  # fmt: skip


@pytest.mark.parametrize(("ranks", "pairs"), [(1, PAIRS[::5]), (2, DIAGONALS[0]), (4, DIAGONALS[1])], ids="124")
def test_shift_convolution_and_halos_equal_the_full_sequence(worlds, ranks, pairs):
    worlds(ranks).run(compare_all, pairs)


def relayouts() -> None:
    ring = mesh(ring=4)["ring"]
    axis = Axis.of(ring)
    x = torch.randn(2, N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for source in layouts(4).values():
        for target in layouts(4).values():
            local_x = source.take(x, axis.rank).requires_grad_()
            with CommLedger() as ledger:
                moved = relayout(local_x, source, target, ring)
                dout = torch.randn(moved.shape, dtype=torch.float64)
                (grad,) = torch.autograd.grad(moved, local_x, dout)
            assert torch.equal(moved, target.take(x, axis.rank))
            assert torch.equal(grad, relayout(dout, target, source, ring))
            stays = len(set(source.positions(axis.rank).tolist()) & set(target.positions(axis.rank).tolist()))
            forward, backward = (layout.sizes[axis.rank] - stays for layout in (source, target))
            assert ledger.bytes(kind="all_to_all", phase="forward") == 2 * 3 * 8 * forward
            assert ledger.bytes(kind="all_to_all", phase="backward") == 2 * 3 * 8 * backward
            assert ledger.bytes() == 2 * 3 * 8 * (forward + backward)
    ids = torch.arange(2 * N).reshape(2, N)
    contiguous, zigzag = layouts(4)["contiguous"], layouts(4)["zigzag"]
    turned = relayout(contiguous.take(ids, axis.rank).t(), contiguous, zigzag, ring, dim=0)
    assert torch.equal(turned.t(), zigzag.take(ids, axis.rank))


def test_relayout_sends_the_tokens_that_change_owner(worlds):
    worlds(4).run(relayouts)


def halo_bytes() -> list[int]:
    ring = mesh(ring=4)["ring"]
    layout = SequenceLayout.contiguous(64, 4)
    local_x = layout.take(torch.randn(2, 64, 3), Axis.of(ring).rank).requires_grad_()
    actual = []
    for documents in (None, [0, 16, 32, 48, 64], [0, 30, 64]):
        with CommLedger() as ledger:
            short_convolution(local_x, torch.randn(3, 4), layout, ring, documents=documents).sum().backward()
        actual += [ledger.bytes(phase="forward"), ledger.bytes(phase="backward"), ledger.messages()]
    return actual


def test_convolution_sends_three_tokens_to_the_next_rank(worlds):
    three = 2 * 3 * 3 * 4  # rows, tokens, channels, bytes
    by_rank = worlds(4).run(halo_bytes)
    assert by_rank[0][:3] == [three, 0, 1] and by_rank[1][:3] == [three, three, 2] and by_rank[3][:3] == [0, three, 1]
    assert all(actual[3:6] == [0, 0, 0] for actual in by_rank)  # every document on one rank: no message
    # rank 1 sends tokens 30 and 31 of the second document
    assert [actual[6] for actual in by_rank] == [three, three // 3 * 2, three, 0]


def dtensors() -> None:
    built = mesh(ring=2, ulysses=2)
    ring = built["ring"]
    layout, target = SequenceLayout.zigzag(32, 2), SequenceLayout.contiguous(32, 2)
    x = torch.randn(2, 32, 3, generator=torch.Generator().manual_seed(0))
    rank = Axis.of(ring).rank
    local_x = DTensor.from_local(layout.take(x, rank), ring, [Shard(1)])
    moved = relayout(local_x, layout, target, ring)
    assert moved.placements == (Shard(1),) and moved.shape == (2, 32, 3)
    assert torch.equal(moved.to_local(), target.take(x, rank))
    assert shift(local_x, layout, ring, 1).placements == (Shard(1),)
    compiled = torch.compile(lambda x: shift(2 * x, layout, ring, 1) + 1, backend="aot_eager")  # has a graph break
    assert torch.equal(compiled(local_x).to_local(), (shift(2 * local_x, layout, ring, 1) + 1).to_local())


def test_dtensors_keep_their_placements(worlds):
    worlds(4).run(dtensors)
