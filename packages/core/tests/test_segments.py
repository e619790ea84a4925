"""Trees of segments as masks, and their order, compared with the path of every token."""

import numpy as np
import pytest

from armillary.core import Segments
from armillary.core.parts import misplaced_segment, path_depths

TREES = {
    "documents": ((0, 3, 7, 8), (-1, -1, -1)),
    "chain": ((0, 2, 5, 9), (-1, 0, 1)),
    "siblings": ((0, 4, 6, 9, 10), (-1, 0, 0, 0)),
    "branching": ((0, 2, 3, 6, 7, 9, 12, 13), (-1, 0, 1, 1, 0, 4, -1)),
}


def paths(ends: tuple[int, ...], parents: tuple[int, ...]) -> list[list[int]]:
    """Returns the positions on the path from the root to each position."""
    paths_of_positions = list[list[int]]()
    for segment, parent in enumerate(parents):
        before = paths_of_positions[ends[parent + 1] - 1] if parent >= 0 else []
        for position in range(ends[segment], ends[segment + 1]):
            before = [*before, position]
            paths_of_positions.append(before)
    return paths_of_positions


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_slices_are_the_paths_of_all_tokens(tree):
    ends, parents = tree
    (slices,) = Segments(ends, parents).slices(ends[-1])
    i, j = np.ogrid[: ends[-1], : ends[-1]]
    counts = np.zeros((ends[-1], ends[-1]), int)
    for q0, q1, k0, k1, low, high in slices.tolist():
        counts += (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (low <= j - i) & (j - i <= high)
    assert counts.max() == 1
    assert [np.flatnonzero(row).tolist() for row in counts] == paths(ends, parents)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_depths_count_the_tokens_before_a_segment_on_its_path(tree):
    ends, parents = tree
    paths_of_positions = paths(ends, parents)
    expected = [len(paths_of_positions[start]) - 1 for start in ends[:-1]]
    assert path_depths(parents, np.diff(ends).tolist()) == expected


def test_segments_out_of_depth_first_order_are_reported():
    assert all(misplaced_segment(parents) is None for _, parents in TREES.values())
    assert misplaced_segment((-1, 0, 0, 1)) == 3  # segment 1 ended when its sibling 2 began
    assert misplaced_segment((-1, 1)) == 1 and misplaced_segment((5,)) == 0
