"""Trees of segments as masks, and their order, compared with the path of every token."""

import numpy as np
import pytest
from core_cases import paths

from armillary.core import Segments
from armillary.core.internal import misplaced_segment, path_depths

TREES = {
    "documents": ((0, 3, 7, 8), (-1, -1, -1)),
    "chain": ((0, 2, 5, 9), (-1, 0, 1)),
    "siblings": ((0, 4, 6, 9, 10), (-1, 0, 0, 0)),
    "branching": ((0, 2, 3, 6, 7, 9, 12, 13), (-1, 0, 1, 1, 0, 4, -1)),
}


@pytest.mark.parametrize(("ends", "parents"), TREES.values(), ids=TREES)
def test_slices_and_depths_follow_the_paths_of_all_tokens(ends, parents):
    (slices,) = Segments(ends, parents).slices(ends[-1])
    i, j = np.ogrid[: ends[-1], : ends[-1]]
    counts = np.zeros((ends[-1], ends[-1]), int)
    for q0, q1, k0, k1, low, high in slices.tolist():
        counts += (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (low <= j - i) & (j - i <= high)
    expected = paths(ends, parents)
    assert counts.max() == 1
    assert [np.flatnonzero(row).tolist() for row in counts] == expected
    depths = [len(expected[start]) - 1 for start in ends[:-1]]
    assert path_depths(parents, np.diff(ends).tolist()) == depths


def test_segments_out_of_depth_first_order_are_reported():
    assert all(misplaced_segment(parents) is None for _, parents in TREES.values())
    assert misplaced_segment((-1, 0, 0, 1)) == 3  # segment 1 ended when its sibling 2 began
    assert misplaced_segment((-1, 1)) == 1 and misplaced_segment((5,)) == 0
