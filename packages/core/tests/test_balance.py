"""Balanced layouts: exact counts of pairs and of token-hops, even ranks, and no more bytes than simpler layouts."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.core import SequenceLayout, attention_balance, attention_traffic
from armillary.core.internal import Slices, mask_slices, slice_array

N, EVEN = 2**16, 1.10


class Mask:
    """A mask with given slices."""

    def __init__(self, *rows: Slices) -> None:
        self.rows = rows

    def slices(self, length: int) -> tuple[Slices, ...]:
        return self.rows


# -- counts -----------------------------------------------------------------------------------------------------------


def visible_pairs(length: int, causal=True, window=None, documents=None) -> torch.Tensor:
    """Returns the (query, key) pairs of a row, from the terms alone."""
    behind, ahead = window or (None, None)
    document = torch.bucketize(torch.arange(length), torch.tensor((documents or (0, length))[1:-1]), right=True)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    visible = document[:, None] == document
    visible &= (j <= i) if causal else True
    visible &= (j >= i - behind) if behind is not None else True
    visible &= (j <= i + ahead) if ahead is not None else True
    return visible


def slice_pairs(length: int, slices: Slices) -> torch.Tensor:
    """Returns how many slices contain each (query, key) pair."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    counts = torch.zeros(length, length, dtype=torch.int64)
    for q0, q1, k0, k1, low, high in slices.tolist():
        counts += (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (low <= j - i) & (j - i <= high)
    return counts


def hops(layout: SequenceLayout, visible: torch.Tensor) -> int:
    """Counts the hops of each key to the last rank that sees it, in the cheaper direction."""
    shards, totals = layout.shards, [0, 0]
    visible_keys = [visible[layout.positions(rank)].any(0) for rank in range(shards)]
    for owner in range(shards):
        for key in layout.positions(owner).tolist():
            ranks = [rank for rank in range(shards) if visible_keys[rank][key]]
            totals[0] += max([(rank - owner) % shards for rank in ranks], default=0)
            totals[1] += max([(owner - rank) % shards for rank in ranks], default=0)
    return min(totals)


@st.composite
def masks(draw: st.DrawFn) -> tuple[int, dict, torch.Tensor]:
    """Draws (length, arguments of a mask, how often each row's pairs count): terms, or arbitrary slices of two rows."""
    length = draw(st.integers(1, 40))
    rows = draw(st.integers(1, 2))
    if draw(st.booleans()):
        cuts = st.sets(st.integers(1, length - 1), max_size=5) if length > 1 else st.just(set[int]())
        documents = draw(
            st.none() | st.lists(cuts.map(lambda c: [0, *sorted(c), length]), min_size=rows, max_size=rows)
        )
        side = st.none() | st.integers(0, 45)
        terms = {"causal": draw(st.booleans()), "window": draw(st.none() | st.tuples(side, side))}
        pairs = [visible_pairs(length, documents=ends, **terms).long() for ends in documents or [None]]
        return length, terms | {"documents": documents}, torch.stack(pairs)
    edges = st.lists(st.integers(0, length), min_size=2, max_size=2, unique=True).map(sorted)
    bands = st.tuples(st.none() | st.integers(-5, 0), st.none() | st.integers(0, 5))
    batch = draw(st.lists(st.lists(st.tuples(edges, edges, bands), max_size=4), min_size=rows, max_size=rows))
    slices = [slice_array((*q, *k, *band) for q, k, band in row) for row in batch]
    return length, {"mask": Mask(*slices)}, torch.stack([slice_pairs(length, row) for row in slices])


@settings(max_examples=150)
@given(masks(), st.integers(1, 6), st.sampled_from(["balanced", "even", "zigzag", "striped", "contiguous"]))
def test_pairs_and_token_hops_are_counted_exactly(case, shards, kind):
    length, mask, pairs = case
    shards = min(shards, length)
    if kind in ("balanced", "even"):
        layout = SequenceLayout.balanced(length, shards, **mask, send_cost=None if kind == "balanced" else 0)
    else:
        layout = getattr(SequenceLayout, kind)(length, shards)
    positions = [layout.positions(shard) for shard in range(shards)]
    assert sorted(torch.cat(positions).tolist()) == list(range(length))
    assert kind == "balanced" or max(layout.sizes) - min(layout.sizes) <= 1
    starts = [[span.start for span in spans] for spans in layout.spans_by_shard]
    assert kind != "even" or all(each == sorted(each) for each in starts)
    for of_keys in (False, True):
        counts = pairs.sum(0).sum(0 if of_keys else 1)
        loads = [int(counts[part].sum()) for part in positions]
        expected = max(loads) * shards / sum(loads) if any(loads) else 1
        assert attention_balance(layout, **mask, of_keys=of_keys) == pytest.approx(expected)
    visible = pairs.sum(0) > 0
    assert attention_traffic(layout, **mask) == hops(layout, visible)
    assert attention_traffic(layout, **mask, of_queries=True) == hops(layout, visible.T)


def test_mask_and_equal_terms_give_equal_layouts():
    ends, window = [0, 3, 40, 64], (5, 0)
    mask = Mask(*mask_slices(64, True, window, ends))
    layout = SequenceLayout.balanced(64, 4, window=window, documents=ends)
    assert SequenceLayout.balanced(64, 4, mask=mask) == layout
    rows = [[0, 3, 40, 64], [0, 30, 31, 64]]
    layout = SequenceLayout.balanced(64, 4, documents=rows)
    for tensors in (torch.tensor(rows), [torch.tensor(row) for row in rows]):
        assert SequenceLayout.balanced(64, 4, documents=tensors) == layout
        assert attention_balance(layout, documents=tensors) == attention_balance(layout, documents=rows)


# -- layouts that ignore bytes ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["web", "code", "books among posts", "one long, one short"])
def test_documents_are_balanced_better_than_by_zigzag(kind):
    length = 1_000_000
    ends = documents(kind, length)
    for shards in (4, 8, 64):
        layout = SequenceLayout.balanced(length, shards, documents=ends, send_cost=0)
        assert attention_balance(SequenceLayout.zigzag(length, shards), documents=ends) > 1.3
        assert attention_balance(layout, documents=ends) < 1.02
        assert attention_balance(layout, documents=ends, of_keys=True) < 1.02
        assert max(len(layout.spans(shard)) for shard in range(shards)) <= 16


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


def test_layouts_without_documents_have_few_spans():
    assert SequenceLayout.balanced(64, 4) == SequenceLayout.zigzag(64, 4)
    assert SequenceLayout.balanced(64, 4, causal=False) == SequenceLayout.contiguous(64, 4)


# -- layouts that send few bytes --------------------------------------------------------------------------------------


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


def most_loaded(layout: SequenceLayout, by: str = "queries", **mask) -> float:
    """Returns the load of the most loaded shard over the mean: tokens, or pairs of the sides that `by` counts."""
    sides = {"queries": (False,), "keys": (True,), "both": (False, True)}[by]
    pairs = max(attention_balance(layout, **mask, of_keys=of_keys) for of_keys in sides)
    return max(pairs, max(layout.sizes) * layout.shards / layout.length)


def hops_of(layout: SequenceLayout, by: str = "queries", **mask) -> int:
    """Returns the token-hops that a layout balanced by `by` weighs: of keys, of queries, or their sum."""
    sides = {"queries": (False,), "keys": (True,), "both": (False, True)}[by]
    return sum(attention_traffic(layout, **mask, of_queries=of_queries) for of_queries in sides)


def without_splits(ends: list[int], shards: int) -> SequenceLayout | None:
    """Deals unsplit documents, greedily by pairs: this layout sends nothing."""
    loads, spans = [0] * shards, [list[range]() for _ in range(shards)]
    for document in sorted(map(range, ends[:-1], ends[1:]), key=len, reverse=True):
        rank = loads.index(min(loads))
        loads[rank] += len(document) * (len(document) + 1) // 2
        spans[rank].append(document)
    return SequenceLayout(spans) if all(spans) else None


@pytest.mark.parametrize("kind", ["uniform", "lognormal", "giant", "short"])
@pytest.mark.parametrize("send_cost", [None, 1])
def test_no_simpler_even_layout_sends_fewer_bytes(kind, send_cost):
    rng, of_zigzag = random.Random(f"{kind} {send_cost}"), list[float]()
    for _ in range(5):
        shards = rng.choice([2, 3, 4, 6, 8, 16, 32])
        ends = drawn(kind, rng, shards)
        layout = SequenceLayout.balanced(N, shards, documents=ends, send_cost=send_cost)
        zigzag = SequenceLayout.zigzag(N, shards)
        assert most_loaded(layout, documents=ends) <= EVEN
        for simpler in (zigzag, SequenceLayout.contiguous(N, shards), without_splits(ends, shards)):
            if simpler and most_loaded(simpler, documents=ends) <= EVEN:
                assert hops_of(layout, documents=ends) <= hops_of(simpler, documents=ends)
        of_zigzag.append(hops_of(layout, documents=ends) / max(1, hops_of(zigzag, documents=ends)))
    assert kind != "short" or np.median(of_zigzag) <= 0.05


def test_bytes_count_where_most_even_layouts_send_many():
    sizes = np.random.default_rng(34).lognormal(0, 1, 29)
    ends = [0, *np.rint(np.cumsum(sizes) / sizes.sum() * N).astype(int).tolist()]
    mask, kv_bytes = Mask(*mask_slices(N, True, None, ends)), 16 * 1024  # of a token-hop, forward and backward
    layout, even = (SequenceLayout.balanced(N, 16, mask=mask, send_cost=cost) for cost in (None, 0))
    mib = [hops_of(each, mask=mask) * kv_bytes // 2**20 for each in (layout, SequenceLayout.zigzag(N, 16), even)]
    assert mib == [2709, 5258, 11682]
    assert most_loaded(layout, mask=mask) <= EVEN


def test_balance_costs_at_most_half_of_the_bytes_of_zigzag_or_saves_more_than_it_costs():
    for seed, shards in (
        (9, 16),
        (10, 32),
        (29, 8),
        (66, 2),
        (18, 4),
        (182, 4),
        *((seed, 16) for seed in range(20, 26)),
    ):
        rng, ends = random.Random(seed), [0]
        while ends[-1] < N:
            ends.append(min(N, ends[-1] + int(rng.lognormvariate(7, 1.2)) + 16))
        layouts = SequenceLayout.balanced(N, shards, documents=ends), SequenceLayout.zigzag(N, shards)
        hops, zigzag_hops = (hops_of(each, documents=ends) for each in layouts)
        loads = [attention_balance(each, documents=ends) for each in layouts]
        assert most_loaded(layouts[0], documents=ends) <= EVEN
        assert shards < 8 or hops <= 1.5 * zigzag_hops
        pairs = sum((b - a) * (b - a + 1) // 2 for a, b in pairwise(ends))
        assert hops <= max(1.5 * zigzag_hops, zigzag_hops + (loads[1] - loads[0]) * pairs / 1000)


def test_balance_must_be_worth_its_bytes():
    """Zigzag sends nothing, and one of two ranks has two thirds of the pairs."""
    ends = [0, 64, 192, 256]
    layout = SequenceLayout.balanced(256, 2, documents=ends, send_cost=1)
    assert attention_balance(layout, documents=ends) <= EVEN and attention_traffic(layout, documents=ends) > 0
    layout = SequenceLayout.balanced(256, 2, documents=ends, send_cost=1e6)
    assert attention_traffic(layout, documents=ends) == 0


def test_layouts_for_states_cut_documents_less_often():
    ends = drawn("lognormal", random.Random(7), 8)
    cuts = list[int]()
    for states in (False, True):
        layout = SequenceLayout.balanced(N, 8, documents=ends, states=states)
        assert most_loaded(layout, documents=ends) <= EVEN
        starts = {span.start for shard in range(8) for span in layout.spans(shard)}
        assert all(span.step == 1 for shard in range(8) for span in layout.spans(shard))
        cuts.append(len(starts - set(ends)))
    assert cuts[1] < cuts[0]


def drawn_mask(rng: random.Random, length: int) -> Mask:
    """Draws a mask of packed documents in one or two rows, of a prompt with answers, or of a window."""

    def ends(count: int) -> list[int]:
        sizes = [rng.lognormvariate(0, rng.choice([0.3, 1, 2])) for _ in range(count)]
        return sorted({0, *np.rint(np.cumsum(sizes) / sum(sizes) * length).astype(int).tolist()})

    rows = [ends(rng.choice([1, 2, 5, 29, 60])) for _ in range(rng.choice([1, 1, 2]))]
    if rng.random() < 0.2:
        prompt, answers = length // rng.randint(2, 20), rows[0]
        starts = [(max(a, prompt), b) for a, b in pairwise(answers) if b > prompt]
        return Mask(slice_array([(0, length, 0, prompt, None, 0), *((a, b, a, b, None, 0) for a, b in starts)]))
    window = rng.choice([None, None, (length // 8, 0), (length // 8, length // 16)])
    return Mask(*mask_slices(length, rng.random() < 0.8, window, rows))


@pytest.mark.parametrize("seed", range(2))
def test_no_layout_that_is_as_even_sends_less(seed):
    rng = random.Random(seed)
    for draw in range(25):
        length = rng.choice([60, 200, 1000, 4096])
        shards, by = rng.choice([2, 3, 4, 8, 16]), rng.choice(["queries", "queries", "keys", "both"])
        mask = drawn_mask(rng, length)
        layout = SequenceLayout.balanced(length, shards, mask=mask, balanced_by=by)
        if draw % 5 == 0:
            assert layout == SequenceLayout.balanced(length, shards, mask=Mask(*mask.rows), balanced_by=by)
        load, sent = most_loaded(layout, by, mask=mask), hops_of(layout, by, mask=mask)
        simpler = [SequenceLayout.zigzag(length, shards), SequenceLayout.contiguous(length, shards)]
        if load > EVEN:  # the layout that ignores bytes is a candidate too
            simpler.append(SequenceLayout.balanced(length, shards, mask=mask, balanced_by=by, send_cost=0))
        for other in simpler:
            assert most_loaded(other, by, mask=mask) > max(load, EVEN) + 1e-9 or sent <= hops_of(other, by, mask=mask)


def test_any_mask_is_even():
    prompt = [(0, 4096, 0, 100, None, 0), *((a, a + 111, a, a + 111, None, 0) for a in range(100, 4096, 111))]
    for name, rows in {
        "window": mask_slices(4096, True, (255, 0)),
        "both ways": mask_slices(4096, False, None, list(range(0, 4097, 64))),
        "rows": mask_slices(4096, True, None, [[0, 1000, 1100, 4096], [0, 30, 2000, 4096]]),
        "prompt and answers": [slice_array(prompt)],
    }.items():
        mask = Mask(*rows)
        layout = SequenceLayout.balanced(4096, 8, mask=mask)
        assert most_loaded(layout, mask=mask) <= EVEN, name
        even = SequenceLayout.balanced(4096, 8, mask=mask, send_cost=0)
        assert hops_of(layout, mask=mask) <= hops_of(even, mask=mask), name


def test_few_documents_leave_no_shard_empty_and_many_short_ones_are_not_sent():
    # One document on each of 15 shards would meet the limit too.
    assert min(SequenceLayout.balanced(15 * 64, 16, documents=range(0, 15 * 64 + 1, 64)).sizes) > 0
    ends = list(range(0, N + 1, N // 64))
    assert attention_traffic(SequenceLayout.balanced(N, 8, documents=ends), documents=ends) == 0


def test_long_documents_among_short_ones_send_a_third_at_most():
    rng, ratios = random.Random(0), list[float]()
    for _ in range(6):
        sizes = [rng.lognormvariate(0, 1) for _ in range(rng.choice([30, 34]))]
        ends = sorted({0, *np.rint(np.cumsum(sizes) / sum(sizes) * N).astype(int).tolist()})
        layout, even = (SequenceLayout.balanced(N, 8, documents=ends, send_cost=send_cost) for send_cost in (None, 0))
        assert most_loaded(layout, documents=ends) <= EVEN
        ratios.append(attention_traffic(layout, documents=ends) / attention_traffic(even, documents=ends))
    assert np.median(ratios) <= 1 / 3


@pytest.mark.parametrize("by", ["keys", "both"])
def test_ranks_are_even_by_the_side_that_does_not_move(by):
    for kind, shards in (("uniform", 2), ("uniform", 8), ("lognormal", 4)):
        ends = drawn(kind, random.Random(kind), shards)
        layout = SequenceLayout.balanced(N, shards, documents=ends, balanced_by=by)
        even = SequenceLayout.balanced(N, shards, documents=ends, send_cost=0)
        assert most_loaded(layout, by, documents=ends) <= EVEN
        queries = [attention_traffic(each, documents=ends, of_queries=True) for each in (layout, even)]
        assert queries[0] <= queries[1]


def test_a_less_even_layout_that_sends_hardly_less_is_not_taken():
    rows = {"documents": [0, 6, 24], "window": (7, 0)}
    assert attention_balance(SequenceLayout.balanced(24, 4, **rows), **rows) <= 1.10
