"""Balanced layouts that send few bytes: exact token-hops, even ranks, and no more bytes than simpler layouts."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.core import SequenceLayout, attention_balance, attention_traffic
from armillary.core.parts import mask_slices, slice_array

N, EVEN = 2**16, 1.10


class Mask:
    def __init__(self, *rows) -> None:
        self.rows = rows

    def slices(self, length: int):
        return self.rows


def dense(length: int, rows) -> torch.Tensor:
    """Returns the (query, key) pairs that are visible in at least one row."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    visible = torch.zeros(length, length, dtype=torch.bool)
    for q0, q1, k0, k1, low, high in np.concatenate(rows).tolist():
        visible |= (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (low <= j - i) & (j - i <= high)
    return visible


def brute_hops(layout: SequenceLayout, visible: torch.Tensor) -> int:
    """Counts the hops of each key to the last rank that sees it, in the cheaper direction."""
    shards, totals = layout.shards, [0, 0]
    visible_keys = [visible[layout.positions(rank)].any(0) for rank in range(shards)]
    for owner in range(shards):
        for key in layout.positions(owner).tolist():
            ranks = [rank for rank in range(shards) if visible_keys[rank][key]]
            totals[0] += max([(rank - owner) % shards for rank in ranks], default=0)
            totals[1] += max([(owner - rank) % shards for rank in ranks], default=0)
    return min(totals)


@settings(max_examples=60)
@given(
    st.integers(1, 40), st.integers(1, 6), st.sampled_from(["balanced", "zigzag", "striped", "contiguous"]), st.data()
)
def test_token_hops_are_exact(length, shards, kind, data):
    shards = min(shards, length)
    edges = st.lists(st.integers(0, length), min_size=2, max_size=2, unique=True).map(sorted)
    bands = st.tuples(st.none() | st.integers(-5, 0), st.none() | st.integers(0, 5))
    batch = data.draw(st.lists(st.lists(st.tuples(edges, edges, bands), max_size=4), min_size=1, max_size=2))
    rows = [slice_array((*q, *k, *band) for q, k, band in row) for row in batch]
    make = getattr(SequenceLayout, kind)
    layout = make(length, shards, mask=Mask(*rows)) if kind == "balanced" else make(length, shards)
    assert sum(layout.sizes) == length
    assert attention_traffic(layout, mask=Mask(*rows)) == brute_hops(layout, dense(length, rows))


def drawn(kind: str, rng: random.Random, shards: int) -> list[int]:
    """Draws boundaries of packed documents."""
    mean = N / rng.randint(8, 16 * shards)
    longest = max(1, N // (16 * shards))
    sizes = [int(N * rng.uniform(0.2, 0.9))] if kind == "giant" else []
    while sum(sizes) < N:
        size = {
            "uniform": lambda: rng.randint(1, 1 + int(2 * mean)),
            "lognormal": lambda: 1 + int(rng.lognormvariate(np.log(mean), 1.2)),
            "giant": lambda: rng.randint(1, 2 * longest),
            "short": lambda: rng.randint(1, longest),
        }[kind]()
        sizes.append(size)
    rng.shuffle(sizes)
    return sorted({0, *np.minimum(np.cumsum(sizes), N).tolist()})


def unevenness(layout: SequenceLayout, ends: list[int]) -> float:
    return max(attention_balance(layout, documents=ends), max(layout.sizes) * layout.shards / N)


def without_splits(ends: list[int], shards: int) -> SequenceLayout | None:
    """Deals unsplit documents, greedily by pairs: this layout sends nothing."""
    loads, spans = [0] * shards, [list[range]() for _ in range(shards)]
    for document in sorted(map(range, ends[:-1], ends[1:]), key=len, reverse=True):
        rank = loads.index(min(loads))
        loads[rank] += len(document) * (len(document) + 1) // 2
        spans[rank].append(document)
    return SequenceLayout(spans) if all(spans) else None


@pytest.mark.parametrize("kind", ["uniform", "lognormal", "giant", "short"])
@pytest.mark.parametrize("draws", [4, pytest.param(250, marks=pytest.mark.long)])
def test_no_simpler_even_layout_sends_fewer_bytes(kind, draws):
    rng, of_zigzag = random.Random(f"{kind} {draws}"), list[float]()
    for _ in range(draws):
        shards = rng.choice([2, 3, 4, 6, 8, 16, 32, 64])
        ends = drawn(kind, rng, shards)
        layout = SequenceLayout.balanced(N, shards, documents=ends)
        hops = attention_traffic(layout, documents=ends)
        assert unevenness(layout, ends) <= EVEN
        zigzag = SequenceLayout.zigzag(N, shards)
        for simpler in (zigzag, SequenceLayout.contiguous(N, shards), without_splits(ends, shards)):
            if simpler and unevenness(simpler, ends) <= EVEN:
                assert hops <= attention_traffic(simpler, documents=ends)
        of_zigzag.append(hops / max(1, attention_traffic(zigzag, documents=ends)))
    if kind == "short":
        assert np.median(of_zigzag) <= 0.05


def test_no_simpler_even_layout_sends_fewer_bytes_if_sends_are_cheap():
    draws = [(random.Random(f"lognormal{seed}"), shards) for seed in range(6) for shards in (2, 3)]
    for rng, shards in draws:
        ends = drawn("lognormal", rng, shards)
        layout = SequenceLayout.balanced(N, shards, documents=ends, send_cost=1)
        for simpler in (SequenceLayout.zigzag(N, shards), SequenceLayout.contiguous(N, shards)):
            if unevenness(simpler, ends) <= EVEN:
                assert attention_traffic(layout, documents=ends) <= attention_traffic(simpler, documents=ends)


def most_loaded(layout: SequenceLayout, mask: Mask, by: str = "queries") -> float:
    """Returns the load of the most loaded shard over the mean: tokens, or pairs of the sides that `by` counts."""
    sides = {"queries": (False,), "keys": (True,), "both": (False, True)}[by]
    pairs = max(attention_balance(layout, mask=mask, of_keys=of_keys) for of_keys in sides)
    return max(pairs, max(layout.sizes) * layout.shards / layout.length)


def hops_of(layout: SequenceLayout, mask: Mask, by: str = "queries") -> int:
    """Returns the token-hops that a layout balanced by `by` weighs: of keys, of queries, or their sum."""
    sides = {"queries": (False,), "keys": (True,), "both": (False, True)}[by]
    return sum(attention_traffic(layout, mask=mask, of_queries=of_queries) for of_queries in sides)


def test_bytes_count_where_no_layout_is_within_the_limit():
    sizes = np.random.default_rng(34).lognormal(0, 1, 29)
    ends = [0, *np.rint(np.cumsum(sizes) / sizes.sum() * N).astype(int).tolist()]
    mask, kv_bytes = Mask(*mask_slices(N, True, None, ends)), 16 * 1024  # of a token-hop, forward and backward
    layout, even = (SequenceLayout.balanced(N, 16, mask=mask, send_cost=cost) for cost in (None, 0))
    mib = [hops_of(each, mask) * kv_bytes // 2**20 for each in (layout, SequenceLayout.zigzag(N, 16), even)]
    assert mib == [3854, 5258, 11682]
    assert EVEN < most_loaded(layout, mask) <= 1.15


def drawn_mask(rng: random.Random, length: int) -> Mask:
    """Draws a mask of packed documents in one or two rows, of a prompt with answers, or of a window."""

    def ends(documents: int) -> list[int]:
        sizes = [rng.lognormvariate(0, rng.choice([0.3, 1, 2])) for _ in range(documents)]
        return sorted({0, *np.rint(np.cumsum(sizes) / sum(sizes) * length).astype(int).tolist()})

    documents = [ends(rng.choice([1, 2, 5, 29, 60])) for _ in range(rng.choice([1, 1, 2]))]
    if rng.random() < 0.2:
        prompt, answers = length // rng.randint(2, 20), documents[0]
        starts = [(max(a, prompt), b) for a, b in pairwise(answers) if b > prompt]
        return Mask(slice_array([(0, length, 0, prompt, None, 0), *((a, b, a, b, None, 0) for a, b in starts)]))
    window = rng.choice([None, None, (length // 8, 0), (length // 8, length // 16)])
    return Mask(*mask_slices(length, rng.random() < 0.8, window, documents))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 40))])
def test_no_layout_that_is_as_even_sends_less(seed):
    rng = random.Random(seed)
    for _ in range(25):
        length = rng.choice([60, 200, 1000, 4096])
        shards, by = rng.choice([2, 3, 4, 8, 16]), rng.choice(["queries", "queries", "keys", "both"])
        mask = drawn_mask(rng, length)
        layout = SequenceLayout.balanced(length, shards, mask=mask, balanced_by=by)
        load, hops = most_loaded(layout, mask, by), hops_of(layout, mask, by)
        simpler = [SequenceLayout.zigzag(length, shards), SequenceLayout.contiguous(length, shards)]
        if load > EVEN:  # the layout that ignores bytes is a candidate too
            simpler.append(SequenceLayout.balanced(length, shards, mask=mask, balanced_by=by, send_cost=0))
        for other in simpler:
            assert most_loaded(other, mask, by) > max(load, EVEN) + 1e-9 or hops <= hops_of(other, mask, by)


def test_fewer_documents_than_shards_leave_no_shard_empty():
    # One document on each of 15 shards would meet the limit too.
    assert min(SequenceLayout.balanced(15 * 64, 16, documents=range(0, 15 * 64 + 1, 64)).sizes) > 0


def test_long_documents_among_short_ones_send_a_third_at_most():
    rng, ratios = random.Random(0), list[float]()
    for _ in range(12):
        sizes = [rng.lognormvariate(0, 1) for _ in range(rng.choice([30, 34]))]
        ends = sorted({0, *np.rint(np.cumsum(sizes) / sum(sizes) * N).astype(int).tolist()})
        layout, even = (SequenceLayout.balanced(N, 8, documents=ends, send_cost=send_cost) for send_cost in (None, 0))
        assert unevenness(layout, ends) <= EVEN
        ratios.append(attention_traffic(layout, documents=ends) / attention_traffic(even, documents=ends))
    assert np.median(ratios) <= 1 / 3


@pytest.mark.parametrize("kind", ["uniform", "lognormal"])
@pytest.mark.parametrize("by", ["keys", "both"])
def test_ranks_are_even_by_the_side_that_does_not_move(kind, by):
    rng = random.Random(kind)
    for shards in (2, 4, 8):
        ends = drawn(kind, rng, shards)
        layout = SequenceLayout.balanced(N, shards, documents=ends, balanced_by=by)
        even = SequenceLayout.balanced(N, shards, documents=ends, send_cost=0)
        assert attention_balance(layout, documents=ends, of_keys=True) <= EVEN
        assert by == "keys" or attention_balance(layout, documents=ends) <= EVEN
        assert max(layout.sizes) * shards <= EVEN * N
        hops, even_hops = (attention_traffic(each, documents=ends, of_queries=True) for each in (layout, even))
        assert hops <= even_hops


def test_queries_travel_to_the_last_rank_with_a_visible_key():
    layout, rows = SequenceLayout.zigzag(24, 4), mask_slices(24, True, (5, 0), [0, 7, 20, 24])
    visible = dense(24, rows)
    assert attention_traffic(layout, mask=Mask(*rows), of_queries=True) == brute_hops(layout, visible.T)


def test_documents_that_fit_stay_on_one_shard():
    ends = list(range(0, N + 1, N // 64))
    layout = SequenceLayout.balanced(N, 8, documents=ends)
    assert attention_traffic(layout, documents=ends) == 0


@pytest.mark.parametrize(
    "rows",
    [
        mask_slices(4096, True, (255, 0)),
        mask_slices(4096, False, None, list(range(0, 4097, 64))),
        mask_slices(4096, True, None, [[0, 1000, 1100, 4096], [0, 30, 2000, 4096]]),
        [
            slice_array(
                [(0, 4096, 0, 100, None, 0), *((a, a + 111, a, a + 111, None, 0) for a in range(100, 4096, 111))]
            )
        ],
    ],
    ids=["window", "both ways", "rows", "prompt and answers"],
)
def test_any_mask_is_even_and_deterministic(rows):
    mask = Mask(*rows)
    layout = SequenceLayout.balanced(4096, 8, mask=mask)
    assert layout == SequenceLayout.balanced(4096, 8, mask=Mask(*(row.copy() for row in rows)))
    assert attention_balance(layout, mask=mask) <= EVEN and max(layout.sizes) <= EVEN * 512
    even = SequenceLayout.balanced(4096, 8, mask=mask, send_cost=0)
    assert attention_traffic(layout, mask=mask) <= attention_traffic(even, mask=mask)
