"""What goes round, as data: everything that is seen, nothing further than it is seen, the shorter way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.attention import AttentionMask, along_dout
from armillary.attention.call import Call
from armillary.attention.kernels import Inputs, Scores, choose_kernel
from armillary.attention.method import key_heads_of
from armillary.attention.rotation import Moving, Rotation
from armillary.core import Axis, SequenceLayout
from armillary.core.testing import relative_error

P = 4


def circle(place: int, moving: Moving) -> Rotation:
    axis = Axis("ring", place, P, None, None)  # type: ignore[arg-type] - nothing is sent
    ranks = tuple(range(P))
    return Rotation(axis, axis, ranks, place, ranks, ranks, moving)


def call_of(mask: AttentionMask, kind: str, length: int = 40) -> Call:
    layout = getattr(SequenceLayout, kind)(length, P)
    kernel = choose_kernel(Inputs("cpu", torch.float32, 8, 8, None, None))
    return Call(mask, layout, layout, Scores(1.0), key_heads_of(2, 2), kernel)


def hops(walk: Rotation, call: Call) -> int:
    return sum(len(tokens) for steps in walk.needed(call) for tokens in steps[1:])


MASKS = st.builds(
    AttentionMask,
    causal=st.booleans(),
    window=st.none() | st.tuples(st.none() | st.integers(0, 30), st.none() | st.integers(0, 30)),
    documents=st.none() | st.sets(st.integers(1, 39)).map(lambda cuts: (0, *sorted(cuts), 40)),
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(MASKS, st.sampled_from(["contiguous", "zigzag", "striped"]), st.sampled_from(["keys", "queries"]))
def test_no_more_goes_on_than_is_seen_and_no_less(mask, kind, moving):
    call = call_of(mask, kind)
    walks = [circle(place, moving).shorter_way(call) for place in range(P)]
    assert len({walk.circle for walk in walks}) == 1, "ranks differ in which way they go"
    walk = walks[0]
    for origin, steps in enumerate(walk.needed(call)):
        assert steps[0] == range(call.layout.sizes[walk.travellers[origin]]) and not steps[P]
        for step in range(1, P):
            later = [walk.seen(call, (origin + s) % P, origin) for s in range(step, P)]
            seen = {token for tokens in later for token in tokens}
            expected = range(min(seen), max(seen) + 1) if seen else range(0)
            assert steps[step] == expected
            assert set(steps[step + 1]) <= set(steps[step])


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
    call = call_of(mask, kind)
    assert hops(circle(0, moving).shorter_way(call), call) == tokens


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
def test_rows_along_dout_have_the_sums_of_out(scale):
    generator = torch.Generator().manual_seed(0)
    dout, out = (torch.randn(2, 5, 3, 16, generator=generator) for _ in range(2))
    dout[0, 0] = 0
    dout = dout * scale
    rows = along_dout.rows(dout, along_dout.ratio(dout, out))
    expected = (dout.double() * out).sum(-1)
    assert relative_error((dout.double() * rows).sum(-1), expected) < 1e-6
    assert rows.norm() <= out.norm() and not rows[0, 0].any()
