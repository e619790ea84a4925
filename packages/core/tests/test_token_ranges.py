"""Ranges of tokens: set operations, and taking from and adding to tensors."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.core import FlatBuffer, TokenRanges

TOKENS = 24
RANGES = st.lists(st.builds(lambda start, size: range(start, start + size), st.integers(0, 19), st.integers(0, 5)))


def tokens(ranges: TokenRanges) -> list[int]:
    return [token for run in ranges.runs for token in run]


def some_of(ranges: TokenRanges, chosen: int) -> TokenRanges:
    """Returns the tokens whose bits in `chosen` are set."""
    return TokenRanges.union(range(token, token + 1) for token in tokens(ranges) if chosen >> token & 1)


@settings(derandomize=True, max_examples=200)
@given(RANGES)
def test_sets_of_tokens(a):
    one = TokenRanges.union(a)
    assert tokens(one) == sorted({token for some in a for token in some})
    assert all(first.stop < second.start for first, second in pairwise(one.runs)) and all(one.runs)
    assert one.count == len(tokens(one))
    ends = np.array([0, *sorted({side for run in one.runs for side in (run.start, run.stop)} - {0, TOKENS}), TOKENS])
    expected = np.array([start in tokens(one) for start in ends[:-1]])
    assert TokenRanges.select(ends, expected).runs == one.runs


@settings(derandomize=True, max_examples=200)
@given(RANGES, st.integers(0, 2**TOKENS - 1))
def test_take_and_add_select_the_tokens(ranges, chosen):
    union = TokenRanges.union(ranges)
    expected = some_of(union, chosen)
    if not expected.runs:
        return
    packed, x = expected.within(union), torch.arange(TOKENS)[None, :, None].expand(2, -1, 3).clone()
    local = union.take(x)
    assert [local[0, union.index(token), 0] for token in tokens(union)] == tokens(union)
    part = packed.take(local)
    assert part[1, :, 2].tolist() == tokens(expected)
    packed.add(local, 100 * part.clone())
    assert local[1, :, 0].tolist() == [token * (101 if token in tokens(expected) else 1) for token in tokens(union)]
    packed.put(local, torch.zeros_like(part))
    assert local[0, :, 1].tolist() == [token * (token not in tokens(expected)) for token in tokens(union)]


def test_take_returns_a_view_if_possible():
    x = torch.randn(2, 6, 3)
    assert TokenRanges((range(6),)).take(x) is x
    one, two = TokenRanges((range(1, 4),)), TokenRanges((range(2), range(3, 5)))
    assert one.take(x).data_ptr() == x[:, 1:].data_ptr()
    assert torch.equal(two.take(x), torch.cat([x[:, :2], x[:, 3:5]], 1))
    assert torch.equal(one.within(TokenRanges((range(1, 5),))).take(x[:, 1:5]), x[:, 1:4])


@pytest.mark.parametrize("shapes", [[(2, 6, 3)], [(2, 6, 3)] * 2, [(2, 6, 3, 2), (2, 6, 3)]])
def test_message_with_some_tokens(shapes):
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    for runs in ((range(6),), (range(1, 4),), (range(2), range(3, 5))):
        expected = TokenRanges(runs)
        every = FlatBuffer.of(tensors, TokenRanges((range(6),)))
        for flat in (FlatBuffer.of(tensors, expected), every.part(expected)):
            assert flat.buffer.is_contiguous() and flat.buffer.nbytes == sum(x.nbytes for x in flat.tensors)
            assert all(torch.equal(result, expected.take(x)) for result, x in zip(flat.tensors, tensors, strict=True))
    assert every.part(TokenRanges((range(6),))) is every
