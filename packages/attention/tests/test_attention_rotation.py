"""What goes round, as data: every token as far as to the last rank that sees it and no further, the shorter way."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.attention import AttentionMask
from armillary.attention.call.spec import AttentionSpec, key_heads_of
from armillary.attention.kernels import Inputs, Scores, choose_kernel
from armillary.attention.reference import visible_pairs
from armillary.attention.rotation.rotate import Rotation
from armillary.attention.rotation.topology import Moving, RingTopology
from armillary.core import Axis, SequenceLayout
from armillary.core.token_ranges import TokenRanges


def ring(
    place: int, moving: Moving, spec: AttentionSpec, ranks: int = 4, topology: RingTopology | None = None
) -> Rotation:
    """As the rank at `place` of a topology sees it, by default of all ranks in order."""
    topology = topology or RingTopology.of_all(ranks, moving)
    axis = Axis("ring", topology.ranks[place], ranks, None, None)  # type: ignore[arg-type] - nothing is sent
    return Rotation.of(axis, axis, topology, spec.grid)


def spec_of(mask: AttentionMask, layout: SequenceLayout, key_layout: SequenceLayout | None = None) -> AttentionSpec:
    kernel = choose_kernel(Inputs("cpu", torch.float32, 8, 8, None, None))
    return AttentionSpec(mask, layout, key_layout or layout, Scores(1.0), key_heads_of(2, 2), kernel)


@st.composite
def layouts(draw, length: int, shards: int) -> SequenceLayout:
    """A usual one, or runs of any length in any order."""
    kind = draw(st.sampled_from(["contiguous", "zigzag", "striped", "shuffled"]))
    if kind != "shuffled":
        return getattr(SequenceLayout, kind)(length, shards)
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), min_size=shards - 1, max_size=12)))
    runs = draw(st.permutations([range(a, b) for a, b in pairwise([0, *cuts, length])]))
    return SequenceLayout([runs[shard::shards] for shard in range(shards)])


CUTS = st.sets(st.integers(1, 39)).map(lambda cuts: (0, *sorted(cuts), 40))
MASKS = st.builds(
    AttentionMask,
    causal=st.booleans(),
    window=st.none() | st.tuples(st.none() | st.integers(0, 30), st.none() | st.integers(0, 30)),
    documents=st.none() | CUTS | st.tuples(CUTS, CUTS),
)


def last_seen(spec: AttentionSpec, topology: RingTopology, origin: int) -> list[int]:
    """For every token of the rotating shard from `origin`: how many steps on the last rank is that sees it."""
    layouts = (spec.layout, spec.key_layout) if topology.moving == "keys" else (spec.key_layout, spec.layout)
    own, last = layouts[1].positions(topology.rotating[origin]), []
    for step in range(len(topology.ranks)):
        stays = layouts[0].positions(topology.stationary[(origin + step) % len(topology.ranks)])
        pair = (stays, own) if topology.moving == "keys" else (own, stays)
        seen = visible_pairs(spec.mask, *pair, batch=2).any(0).any(0 if topology.moving == "keys" else 1)
        last = [step if sees else before for sees, before in zip(seen, last or [0] * len(own), strict=True)]
    return last


def tokens(ranges: TokenRanges) -> list[int]:
    return [token for run in ranges.runs for token in run]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.data(), MASKS, st.integers(1, 5), st.sampled_from(["keys", "queries"]))
def test_every_token_goes_as_far_as_it_is_seen_and_no_further(data, mask, ranks, moving):
    spec = spec_of(mask, data.draw(layouts(40, ranks)), data.draw(layouts(40, ranks)))
    given = RingTopology.of_all(ranks, moving)
    hops = [sum(sum(last_seen(spec, way, origin)) for origin in range(ranks)) for way in (given, given.opposite)]
    topology = given.shorter_way(spec.grid)
    assert topology == (given.opposite if hops[1] < hops[0] else given)
    assert topology.tokens_sent(spec.grid) == min(hops)
    assert [way.tokens_sent(spec.grid) for way in (given, given.opposite)] == hops
    last = [last_seen(spec, topology, origin) for origin in range(ranks)]
    for place in range(ranks):
        rotation = ring(place, moving, spec, ranks, topology)
        for step in rotation.steps:
            held = last[rotation.origin(step.step)]
            assert tokens(step.held) == [token for token, steps in enumerate(held) if steps >= step.step]
            leaving, ending = ([tokens(step.held)[i] for i in tokens(some)] for some in (step.leaving, step.ending))
            assert leaving == [token for token, steps in enumerate(held) if steps > step.step]
            assert ending == [token for token, steps in enumerate(held) if steps == step.step]
            assert step.coming == sum(steps > step.step for steps in last[rotation.origin(step.step + 1)])
            assert tokens(step.returning) == [i for i, steps in enumerate(last[place]) if steps == step.step]


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.data(), MASKS, st.integers(1, 5), st.sampled_from(["keys", "queries"]))
def test_kernels_are_handed_what_they_see_of_what_is_at_hand(data, mask, ranks, moving):
    """Every visible pair once, wherever its tokens are packed."""
    spec = spec_of(mask, data.draw(layouts(40, ranks)), data.draw(layouts(40, ranks)))
    rotation = ring(data.draw(st.integers(0, ranks - 1)), moving, spec, ranks)
    for step, direct in zip(rotation.steps, rotation.direct, strict=True):
        assert [tokens(step.held)[i] for i in tokens(direct.packed)] == tokens(direct.seen)
        for held in (step.held, direct.seen):
            sides = (None, held) if moving == "keys" else (held, None)
            chosen = zip((spec.layout, spec.key_layout), (step.query, step.key), sides, strict=True)
            q, k = (layout.positions(n)[slice(None) if some is None else tokens(some)] for layout, n, some in chosen)
            visible = visible_pairs(mask, q, k, batch=2).expand(2, -1, -1).long()
            count = torch.zeros_like(visible)
            for rows, columns, (low, high) in spec.block(step.query, step.key, *sides).calls:
                part = count[rows.rows, rows.tokens, columns.tokens]
                apart = torch.arange(part.shape[2])[None, :] - torch.arange(part.shape[1])[:, None]
                part += (apart >= (-99 if low is None else low)) & (apart <= (99 if high is None else high))
            assert torch.equal(count, visible)


@pytest.mark.parametrize(
    ("mask", "kind", "moving", "tokens"),
    [
        (AttentionMask(causal=False), "zigzag", "keys", 120),
        (AttentionMask(), "zigzag", "keys", 90),
        (AttentionMask(), "zigzag", "queries", 90),
        (AttentionMask(), "contiguous", "keys", 60),
        (AttentionMask(), "contiguous", "queries", 60),
        (AttentionMask(window=(4, None)), "contiguous", "keys", 3 * 4),
        (AttentionMask(documents=(0, 10, 20, 30, 40)), "contiguous", "keys", 0),
    ],
)
def test_tokens_sent_of_the_120_of_a_full_round(mask, kind, moving, tokens):
    spec = spec_of(mask, getattr(SequenceLayout, kind)(40, 4))
    assert ring(0, moving, spec).topology.tokens_sent(spec.grid) == tokens


def test_what_lies_between_tokens_that_are_seen_stays_behind():
    """Shard 1 has positions 8..15 and 48..55. Rank 0 sees their ends, of the first and the last document; ranks 2 and 3
    what is between."""
    mask = AttentionMask(causal=False, documents=(0, 12, 52, 64))
    spec = spec_of(mask, SequenceLayout.zigzag(64, 4))
    rotation = ring(1, "keys", spec)
    assert rotation.topology == RingTopology.of_all(4, "keys")
    whole, middle, ends = (range(16),), (range(4, 12),), (range(4), range(12, 16))
    reach = rotation.topology.reach(spec.grid)[1]
    assert [reach.needed(step).runs for step in range(5)] == [whole, whole, whole, ends, ()]
    assert [reach.ending(step).runs for step in range(4)] == [(), (), middle, ends]
    assert reach.counts == (16, 16, 16, 8, 0)
    assert [step.returning.runs for step in rotation.steps] == [(), (), middle, ends]
    last = ring(0, "keys", spec).steps[3]
    assert (last.held.runs, last.leaving.runs, last.ending.runs) == (ends, (), (range(8),))
    assert last.held.index(13) == 5
    seen = ring(0, "queries", spec).direct[3]
    assert (seen.seen.runs, seen.packed.runs) == (ends, (range(8),))
