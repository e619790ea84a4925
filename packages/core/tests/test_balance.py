"""Balanced layouts: equal attention on every shard, exact counts, few spans."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armillary.core import SequenceLayout, attention_balance
from armillary.core.balance import TokenRuns, distribute
from armillary.core.layout_cost import RingShares
from armillary.core.parts import Slices, mask_slices, slice_array


class Mask:
    """A mask with given slices."""

    def __init__(self, *rows: Slices) -> None:
        self.rows = rows

    def slices(self, length: int) -> tuple[Slices, ...]:
        return self.rows


def brute(length: int, causal=True, window=None, documents=None, of_keys: bool = False) -> list[int]:
    """Returns the number of keys that each query sees, or of queries that see each key."""
    behind, ahead = window or (None, None)
    document = torch.bucketize(torch.arange(length), torch.tensor((documents or (0, length))[1:-1]), right=True)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    visible = document[:, None] == document
    visible &= (j <= i) if causal else True
    visible &= (j >= i - behind) if behind is not None else True
    visible &= (j <= i + ahead) if ahead is not None else True
    return visible.sum(0 if of_keys else 1).tolist()


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, dict]:
    length = draw(st.integers(1, 40))
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=5))) if length > 1 else []
    side = st.none() | st.integers(0, 45)
    window = draw(st.none() | st.tuples(side, side))
    documents = draw(st.sampled_from([None, (0, *cuts, length)]))
    return length, {"causal": draw(st.booleans()), "window": window, "documents": documents}


@given(cases(), st.data())
def test_pairs_are_counted_exactly(case, data):
    length, mask = case
    ring = RingShares(length, 1, mask_slices(length, **mask))
    cuts = data.draw(st.lists(st.integers(0, length), min_size=2, max_size=6, unique=True).map(sorted))
    part = TokenRuns(np.array(cuts[:-1:2]), np.array(cuts[1::2]))
    positions = [p for a, b in zip(part.starts.tolist(), part.stops.tolist(), strict=True) for p in range(a, b)]
    assert len(positions) == part.size
    inner = data.draw(st.lists(st.integers(0, part.size), max_size=3).map(sorted))
    ends = [0, *inner, part.size]
    for side, of_keys in enumerate((False, True)):
        counts = [brute(length, **mask, of_keys=of_keys)[position] for position in positions]
        expected = [sum(counts[a:b]) for a, b in pairwise(ends)]
        assert part.pairs(np.array(ends), ring)[side].tolist() == expected
    pieces = zip(*(x.tolist() for x in part.pieces(np.array(ends))), strict=True)
    numbered = [(position, chunk) for start, stop, chunk in pieces for position in range(start, stop)]
    assert [position for position, _ in numbered] == positions
    assert [chunk for _, chunk in numbered] == [i for i, (a, b) in enumerate(pairwise(ends)) for _ in range(a, b)]


@given(cases(), st.integers(1, 5), st.sampled_from(["balanced", "zigzag", "striped", "contiguous"]), st.booleans())
def test_balance_is_the_most_loaded_shard_over_the_mean(case, shards, kind, of_keys):
    length, mask = case
    shards = min(shards, length)
    make = SequenceLayout.balanced if kind == "balanced" else getattr(SequenceLayout, kind)
    layout = make(length, shards, **mask) if kind == "balanced" else make(length, shards)
    counts = torch.tensor(brute(length, **mask, of_keys=of_keys))
    loads = [int(counts[layout.positions(shard)].sum()) for shard in range(shards)]
    assert attention_balance(layout, **mask, of_keys=of_keys) == pytest.approx(max(loads) * shards / sum(loads))


def test_rows_of_a_batch_are_balanced_together():
    ends = [documents(kind, 100_000) for kind in ("web", "books among posts")]
    layout = SequenceLayout.balanced(100_000, 8, documents=ends, send_cost=0)
    loads = torch.zeros(8)
    for row in ends:
        starts = torch.tensor(row)
        for shard in range(8):
            positions = layout.positions(shard)
            loads[shard] += (positions - starts[torch.bucketize(positions, starts, right=True) - 1] + 1).sum()
    assert attention_balance(layout, documents=ends) == pytest.approx(float(loads.max() / loads.mean()))
    assert loads.max() / loads.mean() < 1.02


@given(cases(), st.integers(1, 6))
def test_every_position_has_one_shard_and_sizes_are_even(case, shards):
    length, mask = case
    shards = min(shards, length)
    layout = SequenceLayout.balanced(length, shards, **mask, send_cost=0)
    positions = torch.cat([layout.positions(shard) for shard in range(shards)])
    assert sorted(positions.tolist()) == list(range(length))
    assert max(layout.sizes) - min(layout.sizes) <= 1
    assert all(
        a.start < b.start for s in range(shards) for a, b in zip(layout.spans(s), layout.spans(s)[1:], strict=False)
    )


def documents(kind: str, length: int) -> list[int]:
    """Document boundaries of a realistic mix."""
    rng, ends = random.Random(0), [0]
    while ends[-1] < length:
        size = {
            "web": lambda: int(rng.lognormvariate(7, 1.5)) + 1,
            "code": lambda: int(300 * rng.paretovariate(0.9)),
            "books among posts": lambda: rng.choice([500, 2_000, 8_000, 100_000, 300_000]),
            "one long, one short": lambda: length * 3 // 5,
        }[kind]()
        ends.append(min(length, ends[-1] + size))
    return ends


@pytest.mark.parametrize("shards", [4, 8, 64])
@pytest.mark.parametrize("kind", ["web", "code", "books among posts", "one long, one short"])
def test_documents_are_balanced_better_than_by_zigzag(kind, shards):
    length = 1_000_000
    ends = documents(kind, length)
    layout = SequenceLayout.balanced(length, shards, documents=ends, send_cost=0)
    assert attention_balance(SequenceLayout.zigzag(length, shards), documents=ends) > 1.3
    assert attention_balance(layout, documents=ends) < 1.02
    assert attention_balance(layout, documents=ends, of_keys=True) < 1.02
    assert max(len(layout.spans(shard)) for shard in range(shards)) <= 16


def test_layouts_without_documents_have_few_spans():
    causal = SequenceLayout.balanced(64, 4)
    assert causal == SequenceLayout.zigzag(64, 4)
    assert SequenceLayout.balanced(64, 4, causal=False) == SequenceLayout.contiguous(64, 4)


def test_documents_may_be_tensors():
    ends = [[0, 3, 40, 64], [0, 30, 31, 64]]
    expected = SequenceLayout.balanced(64, 4, documents=ends)
    for tensors in (torch.tensor(ends), [torch.tensor(row) for row in ends]):
        assert SequenceLayout.balanced(64, 4, documents=tensors) == expected
        assert attention_balance(expected, documents=tensors) == attention_balance(expected, documents=ends)


def test_pieces_are_dealt_evenly_and_swapped():
    falling = np.array([[8 - i for i in range(8)], [i + 1 for i in range(8)]])  # like the chunks of a causal mask
    one_kind = np.zeros(8, dtype=np.int64)
    for shards in (2, 4):
        owner = distribute(falling, one_kind, shards, goal=0)
        assert loads_of(falling, owner, shards) == [[36 // shards] * 2] * shards
    works = np.array([[9, 1, 1, 1, 1, 1]] * 2)
    owner = distribute(works, one_kind[:6], 3, goal=0)
    assert loads_of(works, owner, 3) == [[10, 10], [2, 2], [2, 2]]


def loads_of(works, owner, shards: int) -> list[list[int]]:
    return [works[:, owner == shard].sum(1).tolist() for shard in range(shards)]


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_each_shard_gets_equally_many_pieces_of_a_kind(shards, each, kinds, rng):
    kind = np.repeat(np.arange(kinds), each * shards)
    works = np.array([[rng.randint(0, 99) ** 2 for _ in kind] for _ in range(2)])
    owner = distribute(works, kind, shards, goal=0)
    for number in range(kinds):
        assert np.bincount(owner[kind == number], minlength=shards).tolist() == [each] * shards


def test_tokens_with_most_pairs_are_cut_finer():
    """A prompt of 1,000 tokens with answers of 1,000: two thirds of all pairs have keys of the prompt."""
    length, shards = 1_000_000, 32
    starts = range(1000, length, 1000)
    prompt = [(0, length, 0, 1000, None, 0)]
    mask = Mask(slice_array(prompt + [(at, at + 1000, at, at + 1000, None, 0) for at in starts]))
    assert attention_balance(SequenceLayout.zigzag(length, shards), mask=mask, of_keys=True) > 15
    layout = SequenceLayout.balanced(length, shards, mask=mask, send_cost=0)
    assert attention_balance(layout, mask=mask) < 1.05
    assert attention_balance(layout, mask=mask, of_keys=True) < 1.05
    assert max(len(layout.spans(shard)) for shard in range(shards)) <= 16
    assert max(layout.sizes) == min(layout.sizes)


@given(st.integers(1, 60), st.integers(1, 6), st.data())
def test_with_random_slices_each_position_is_in_one_shard(length, shards, data):
    shards = min(shards, length)
    edges = st.lists(st.integers(0, length), min_size=2, max_size=2, unique=True).map(sorted)
    rows = data.draw(st.lists(st.tuples(edges, edges), max_size=4))
    mask = Mask(slice_array((*queries, *keys, None, None) for queries, keys in rows))
    layout = SequenceLayout.balanced(length, shards, mask=mask, send_cost=0)
    assert layout.length == length and max(layout.sizes) - min(layout.sizes) <= 1
    pairs = np.zeros((length, length))
    for queries, keys in rows:
        pairs[slice(*queries), slice(*keys)] += 1
    for side, of_keys in ((1, False), (0, True)):
        counts = pairs.sum(side)
        loads = [counts[layout.positions(shard).numpy()].sum() for shard in range(shards)]
        expected = max(loads) * shards / sum(loads) if rows else 1
        assert attention_balance(layout, mask=mask, of_keys=of_keys) == pytest.approx(expected)


def test_mask_and_equal_terms_give_equal_layouts():
    ends, window = [0, 3, 40, 64], (5, 0)
    mask = Mask(*mask_slices(64, True, window, ends))
    layout = SequenceLayout.balanced(64, 4, window=window, documents=ends)
    assert SequenceLayout.balanced(64, 4, mask=mask) == layout
    assert attention_balance(layout, mask=mask) == attention_balance(layout, window=window, documents=ends)
