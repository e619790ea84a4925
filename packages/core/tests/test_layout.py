"""Layouts: every position has one shard, sizes differ by at most one, `join` inverts `take`."""

from itertools import pairwise

import pytest
import torch
from core_cases import LAYOUTS
from hypothesis import given
from hypothesis import strategies as st

from armillary.core import SequenceLayout


@st.composite
def layouts(draw: st.DrawFn) -> SequenceLayout:
    shards = draw(st.integers(1, 8))
    length = draw(st.integers(shards, 80))
    kind = draw(st.sampled_from(sorted(LAYOUTS)))
    layout = LAYOUTS[kind](length, shards)
    assert max(layout.sizes) - min(layout.sizes) <= 1
    assert kind == "zigzag" or list(layout.sizes) == sorted(layout.sizes, reverse=True)
    return layout.refine(draw(st.integers(1, min(layout.sizes))))


@st.composite
def partitions(draw: st.DrawFn) -> SequenceLayout:
    """Random positions on each shard, in random order."""
    order = draw(st.permutations(range(draw(st.integers(1, 24)))))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(order) - 1)), max_size=4)) if len(order) > 1 else ())
    ends = [0, *cuts, len(order)]
    return SequenceLayout([[range(p, p + 1) for p in order[a:b]] for a, b in pairwise(ends)])


def all_positions(layout: SequenceLayout) -> list[int]:
    return torch.cat([layout.positions(shard) for shard in range(layout.shards)]).tolist()


@given(layouts() | partitions())
def test_every_position_has_one_shard(layout):
    assert sorted(all_positions(layout)) == list(range(layout.length))
    assert [len(layout.positions(shard)) for shard in range(layout.shards)] == list(layout.sizes)
    assert [p for span in layout.spans(0) for p in span] == layout.positions(0).tolist()


@given(layouts() | partitions(), st.integers(0, 2))
def test_join_undoes_take_and_both_carry_gradients(layout, dim):
    shape = [2, 3]
    shape.insert(dim, layout.length)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    parts = [layout.take(x, shard, dim=dim) for shard in range(layout.shards)]
    full = layout.join(parts, dim=dim)
    assert torch.equal(full, x)
    (full * x.detach()).sum().backward()
    assert torch.equal(x.grad, x.detach())


def test_the_layouts_match_the_papers():
    assert SequenceLayout.contiguous(8, 4).positions(1).tolist() == [2, 3]
    assert SequenceLayout.zigzag(16, 4).positions(1).tolist() == [2, 3, 12, 13]
    assert SequenceLayout.striped(8, 4).spans(1) == (range(1, 8, 4),)
    assert SequenceLayout.striped(16, 4, stripe=2).positions(1).tolist() == [2, 3, 10, 11]
    usp = SequenceLayout.zigzag(16, 2).refine(2)  # arXiv 2405.07719, algorithm 2
    assert usp.positions(0).tolist() == [0, 1, 2, 3]
    assert usp.positions(1).tolist() == [12, 13, 14, 15]
    assert usp.positions(2).tolist() == [4, 5, 6, 7]


@given(layouts(), st.integers(1, 6))
def test_coarsen_undoes_refine(layout, n):
    if n <= min(layout.sizes):
        assert all_positions(layout.refine(n).coarsen(n)) == all_positions(layout)
    contiguous = SequenceLayout.contiguous(40, 4)
    assert contiguous.refine(n).coarsen(n) == contiguous
    zigzag = SequenceLayout.zigzag(97, 4)
    assert zigzag.refine(n).coarsen(n) == zigzag


def test_equal_layouts_compare_and_hash_equal():
    a, b = SequenceLayout.zigzag(12, 2), SequenceLayout([[range(3), range(9, 12)], [range(3, 6), range(6, 9)]])
    assert a == b
    assert hash(a) == hash(b)
    assert a != SequenceLayout.contiguous(12, 2)
    assert "length=12, shards=2" in repr(a)


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_at_positions_are_their_owners(shards):
    strided = SequenceLayout([[range(0, 12, 2), range(13, 20)], [range(1, 12, 2), range(12, 13)]])
    kinds = (SequenceLayout.zigzag, SequenceLayout.contiguous, SequenceLayout.striped)
    for layout in (strided, SequenceLayout.striped(20, shards, 3), *(kind(20, shards) for kind in kinds)):
        for shard in range(layout.shards):
            assert (layout.shards_at(layout.positions(shard).numpy()) == shard).all()
