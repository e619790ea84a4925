"""Counts of visible pairs in closed form, compared with dense masks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from armillary.attention import AttentionMask

SIDES = st.none() | st.integers(0, 45)


@st.composite
def masks(draw: st.DrawFn) -> tuple[AttentionMask, int]:
    length = draw(st.integers(1, 40))
    cuts = draw(st.sets(st.integers(1, max(1, length - 1)), max_size=6)) if length > 1 else set()
    documents = draw(st.sampled_from([None, [0, *sorted(cuts), length]]))
    return AttentionMask(draw(st.booleans()), (draw(SIDES), draw(SIDES)), documents), length


@given(masks())
def test_pairs_equal_dense_counts(drawn):
    mask, length = drawn
    positions = torch.arange(length)
    assert mask.pairs(length) == mask.visible(positions, positions).sum()


@given(masks(), SIDES)
def test_narrowed_mask_is_the_intersection_with_a_window(drawn, window):
    mask, length = drawn
    positions = torch.arange(length)
    both = mask.visible(positions, positions) & AttentionMask(False, (window, None)).visible(positions, positions)
    assert torch.equal(mask.narrow(window).visible(positions, positions), both)


def test_narrow_enough_mask_is_returned_unchanged():
    mask = AttentionMask(window=(3, None), documents=[0, 5, 9])
    assert mask.narrow(3) is mask.narrow(None) is mask
    assert mask.narrow(2) == AttentionMask(window=(2, None), documents=[0, 5, 9])


def test_a_hundred_million_tokens_are_counted_at_once():
    length = 10**8
    assert AttentionMask().pairs(length) == length * (length + 1) // 2
    assert AttentionMask(window=(4095, None)).pairs(length) == 4096 * length - 4095 * 4096 // 2


def test_each_row_has_its_own_documents():
    mask = AttentionMask(documents=[[0, 4, 10], [0, 10]])
    assert (mask.pairs(10, 0), mask.pairs(10, 1)) == (31, 55)
