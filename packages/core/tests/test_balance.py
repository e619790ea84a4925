"""Balanced layouts: as much attention on every shard, exact counts, few spans."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armillary.core import SequenceLayout, attention_balance
from armillary.core.balance import Visibility, shared_out


def brute(vis: Visibility, length: int, of_keys: bool = False) -> list[int]:
    """Keys that each query sees, or queries that see each key."""
    document = torch.bucketize(torch.arange(length), torch.tensor(vis.ends[1:-1]), right=True)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = document[:, None] == document
    seen &= (j >= i - vis.left) if vis.left is not None else True
    seen &= (j <= i + vis.right) if vis.right is not None else True
    return seen.sum(0 if of_keys else 1).tolist()


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
    vis = Visibility.of(length, **mask)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    assert vis.pairs(start, stop) == sum(brute(vis, length)[start:stop])


@given(cases(), st.integers(1, 5), st.sampled_from(["balanced", "zigzag", "striped", "contiguous"]), st.booleans())
def test_balance_is_the_most_loaded_shard_over_the_mean(case, shards, kind, of_keys):
    length, mask = case
    shards = min(shards, length)
    make = SequenceLayout.balanced if kind == "balanced" else getattr(SequenceLayout, kind)
    layout = make(length, shards, **mask) if kind == "balanced" else make(length, shards)
    seen = torch.tensor(brute(Visibility.of(length, **mask), length, of_keys))
    loads = [int(seen[layout.positions(shard)].sum()) for shard in range(shards)]
    assert attention_balance(layout, **mask, of_keys=of_keys) == pytest.approx(max(loads) * shards / sum(loads))


def test_rows_of_a_batch_are_balanced_together():
    ends = [documents(kind, 100_000) for kind in ("web", "books among posts")]
    layout = SequenceLayout.balanced(100_000, 8, documents=ends)
    loads = torch.zeros(8)
    for row in ends:
        vis = Visibility.of(100_000, True, None, row)
        loads += torch.tensor([float(vis.seen_from(layout.positions(shard)).sum()) for shard in range(8)])
    assert attention_balance(layout, documents=ends) == pytest.approx(float(loads.max() / loads.mean()))
    assert loads.max() / loads.mean() < 1.02


@given(cases(), st.integers(1, 6))
def test_every_position_is_held_once_and_sizes_are_even(case, shards):
    length, mask = case
    shards = min(shards, length)
    layout = SequenceLayout.balanced(length, shards, **mask)
    held = torch.cat([layout.positions(shard) for shard in range(shards)])
    assert sorted(held.tolist()) == list(range(length))
    assert max(layout.sizes) - min(layout.sizes) <= 1
    assert all(
        a.start < b.start for s in range(shards) for a, b in zip(layout.spans(s), layout.spans(s)[1:], strict=False)
    )


def documents(kind: str, length: int) -> list[int]:
    """Boundaries of a realistic mix."""
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
def test_documents_are_balanced_where_zigzag_is_not(kind, shards):
    length = 1_000_000
    ends = documents(kind, length)
    layout = SequenceLayout.balanced(length, shards, documents=ends)
    assert attention_balance(SequenceLayout.zigzag(length, shards), documents=ends) > 1.3
    assert attention_balance(layout, documents=ends) < 1.02
    assert attention_balance(layout, documents=ends, of_keys=True) < 1.02
    assert max(len(layout.spans(shard)) for shard in range(shards)) <= 16


def test_without_documents_it_is_as_simple_as_can_be():
    causal = SequenceLayout.balanced(64, 4)
    assert causal == SequenceLayout.zigzag(64, 4)
    assert SequenceLayout.balanced(64, 4, causal=False) == SequenceLayout.contiguous(64, 4)


def test_documents_may_be_tensors():
    ends = [[0, 3, 40, 64], [0, 30, 31, 64]]
    expected = SequenceLayout.balanced(64, 4, documents=ends)
    for tensors in (torch.tensor(ends), [torch.tensor(row) for row in ends]):
        assert SequenceLayout.balanced(64, 4, documents=tensors) == expected
        assert attention_balance(expected, documents=tensors) == attention_balance(expected, documents=ends)


def test_pieces_are_shared_out_evenly_and_exchanged():
    falling = [(8 - i, i + 1) for i in range(8)]  # the pairs of a causal mask's chunks, as queries and as keys
    for shards in (2, 4):
        loads = [
            [sum(side) for side in zip(*(falling[i] for i in part), strict=True)]
            for part in shared_out(falling, shards)
        ]
        assert loads == [[36 // shards] * 2] * shards
    works = [(9, 9), *[(1, 1)] * 5]
    assert [sum(works[i][0] for i in part) for part in shared_out(works, 3)] == [10, 2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"documents": [0, 5]}, r"must rise from 0 to the length 8"),
        ({"documents": []}, r"must rise from 0 to the length 8"),
        ({"documents": [[0, 8], []]}, r"must rise from 0 to the length 8"),
        ({"documents": [0, 5, 5, 8]}, r"must rise from 0 to the length 8"),
        ({"window": (-1, 0)}, r"each None or at least 0"),
    ],
)
def test_what_is_no_mask_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SequenceLayout.balanced(8, 2, **options)
    with pytest.raises(ValueError, match=message):
        attention_balance(SequenceLayout.zigzag(8, 2), **options)
