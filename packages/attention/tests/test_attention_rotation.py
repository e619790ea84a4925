"""What goes round, as data: everything that is seen, nothing further than it is seen, the shorter way."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.attention import AttentionMask
from armillary.attention.kernels import Inputs, Scores, choose_kernel
from armillary.attention.rotation.rotate import Rotation
from armillary.attention.rotation.topology import Moving, RingTopology
from armillary.attention.spec import AttentionSpec, key_heads_of
from armillary.core import Axis, SequenceLayout


def ring(place: int, moving: Moving, spec: AttentionSpec, ranks: int = 4) -> Rotation:
    axis = Axis("ring", place, ranks, None, None)  # type: ignore[arg-type] - nothing is sent
    return Rotation.of(axis, axis, RingTopology.of_all(ranks, moving), spec.grid)


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


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.data(), MASKS, st.integers(1, 5), st.sampled_from(["keys", "queries"]))
def test_no_more_goes_on_than_is_seen_and_no_less(data, mask, ranks, moving):
    spec = spec_of(mask, data.draw(layouts(40, ranks)), data.draw(layouts(40, ranks)))
    rings = [ring(place, moving, spec, ranks) for place in range(ranks)]
    assert len({ring.topology for ring in rings}) == 1, "ranks differ in which way they go"
    first, sizes = rings[0], (spec.key_layout if moving == "keys" else spec.layout).sizes
    for origin, steps in enumerate(first.needed):
        assert len(steps) == ranks + 1 and steps[0] == range(sizes[first.topology.rotating[origin]])
        for step in range(1, ranks + 1):
            later = [first.seen((origin + s) % ranks, origin) for s in range(step, ranks)]
            seen = {token for tokens in later for token in tokens}
            assert steps[step] == (range(min(seen), max(seen) + 1) if seen else range(0))
            assert set(steps[step]) <= set(steps[step - 1])


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
