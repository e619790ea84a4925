"""Masks of every kind as values: slices, pairs and positions against the oracle; comparing and rebuilding."""

import copy
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors

from armillary.attention import AttentionMask, Slice
from armillary.attention.mask import Prefix, Tree
from armillary.attention.reference import visible_pairs
from conformance.draw_masks import (
    block_mask,
    chunked_mask,
    cut,
    plain_mask,
    prefix_mask,
    row_masks,
    slice_mask,
    span_mask,
    tree_mask,
)

DRAWS: dict[str, Callable[[Random, int], AttentionMask]] = {
    "plain": plain_mask,
    "slices": slice_mask,
    "tree": tree_mask,
    "prefix": prefix_mask,
    "chunked": chunked_mask,
    "image-spans": span_mask,
    "blocks": block_mask,
    "rows": lambda random, length: row_masks(random, length, 3),
}
CASES = 40
"""Masks of each kind."""

each_kind = pytest.mark.parametrize("kind", DRAWS)


def masks(kind: str, count: int = CASES):
    """Yields `count` times (random, length, mask) of a kind; half of the masks also have a window or are causal."""
    for seed in range(count):
        random = Random(f"{kind} {seed}")
        length = random.choice((random.randint(1, 12), random.randint(8, 40)))
        mask = DRAWS[kind](random, length)
        yield random, length, cut(random, mask, length) if seed % 2 else mask


def oracle_pairs(mask: AttentionMask, queries: int, keys: int | None = None) -> Tensor:
    """Visible pairs by the oracle: bool [rows, N, S]."""
    keys = queries if keys is None else keys
    return visible_pairs(mask, torch.arange(queries), torch.arange(keys), batch=mask.batch or 1)


def counted(slices: np.ndarray, queries: int, keys: int) -> Tensor:
    """Counts the slices that contain each pair."""
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    count = torch.zeros(queries, keys, dtype=torch.long)
    for q0, q1, k0, k1, low, high in slices.tolist():
        count += (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (low <= j - i) & (j - i <= high)
    return count


# -- against the oracle -----------------------------------------------------------------------------------------------


@each_kind
def test_slices_pairs_and_positions_are_the_oracles(kind):
    for random, length, mask in masks(kind):
        slices, expected_rows = mask.slices(length), oracle_pairs(mask, length)
        assert len(slices) == len(expected_rows), mask
        i, j = (torch.tensor(random.choices(range(length), k=random.randint(1, length))) for _ in range(2))
        for row, expected in enumerate(expected_rows):
            assert slices[row].dtype == np.int64 and slices[row].shape[1:] == (6,), mask
            assert torch.equal(counted(slices[row], length, length), expected.long()), (mask, row)
            assert torch.equal(mask.visible(i, j, row), expected[i][:, j]), (mask, row)
            assert mask.pairs(length, row) == expected.sum(), (mask, row)
            of_row = mask.row(row)
            assert torch.equal(oracle_pairs(of_row, length)[0], expected), (mask, row)
            ends = of_row.boundaries() or (0, length)
            starts = torch.tensor([a for a, b in pairwise(ends) for _ in range(b - a)])
            positions = mask.positions(length, row)
            assert positions.dtype == torch.long and torch.equal(positions, depths(of_row, length) - starts), (
                mask,
                row,
            )


@pytest.mark.parametrize("kind", ["plain", "slices", "blocks"])
def test_keys_may_differ_from_queries(kind):
    for seed in range(CASES):
        random = Random(f"{kind} {seed}")
        length, keys = random.randint(1, 30), random.randint(1, 30)
        mask = plain_mask(random, length, documents=False) if kind == "plain" else DRAWS[kind](random, length, keys)  # pyright: ignore[reportCallIssue]
        (slices,) = mask.slices(length, keys)
        assert torch.equal(counted(slices, length, keys), oracle_pairs(mask, length, keys)[0].long()), mask


@each_kind
def test_narrowed_masks_limit_distances_along_tree_paths(kind):
    for random, length, mask in masks(kind):
        behind = random.randint(0, length)
        narrowed = mask.narrow(behind)
        for row, expected in enumerate(oracle_pairs(mask, length)):
            depth = depths(mask.row(row), length)
            near = depth[:, None] - depth[None, :] <= behind
            rows = oracle_pairs(narrowed, length)
            assert torch.equal(rows[min(row, len(rows) - 1)], expected & near), mask
            assert torch.equal(counted(narrowed.slices(length)[row], length, length), (expected & near).long()), mask
        assert narrowed.narrow(behind) is narrowed and mask.narrow(None) is mask


def depths(mask: AttentionMask, length: int) -> Tensor:
    """Returns the depth of tokens in trees, the number of visible ancestors; their positions in other masks."""
    if not isinstance(mask.pattern, Tree):
        return torch.arange(length)
    return oracle_pairs(replace(mask, window=None), length)[0].sum(1) - 1


def test_pairs_of_long_masks_are_counted_by_slices():
    assert AttentionMask(window=(4095, None)).pairs(10**8) == 4096 * 10**8 - 4095 * 4096 // 2
    length = 2**24
    ends, half = (*range(0, length + 1, length // 16),), length // 2
    documents = AttentionMask(documents=ends).pairs(length)
    assert documents == 16 * (2**20 * (2**20 + 1) // 2)
    assert AttentionMask.chunked(2**20).pairs(length) == documents
    assert AttentionMask.tree(ends, (*range(-1, 15),)).pairs(length) == AttentionMask().pairs(length)
    star = AttentionMask.tree(ends, [-1, *[0] * 15])
    assert star.pairs(length) == documents + 15 * 2**40
    assert (
        AttentionMask.prefix((0, length), [half]).pairs(length)
        == AttentionMask().pairs(length) + half * (half - 1) // 2
    )
    assert AttentionMask.blocks(np.tri(16, dtype=bool), 2**20).pairs(length) == 136 * 2**40


# -- as values --------------------------------------------------------------------------------------------------------


@each_kind
def test_equal_masks_compare_equal_and_others_do_not(kind):
    drawn_masks = [list(masks(kind, 20)) for _ in range(2)]
    for (_, length, one), (_, _, other) in zip(*drawn_masks, strict=True):
        assert one == other and hash(one) == hash(other) and one is not other
        for same in (replace(one), copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert same == one and hash(same) == hash(one), one
            assert np.array_equal(np.concatenate(same.slices(length)), np.concatenate(one.slices(length)))
        wider = replace(one, window=(length + 7, None))
        assert wider != one and replace(wider, window=one.window) == one


def test_kinds_with_equal_pairs_are_different_masks():
    same = [
        AttentionMask(),
        AttentionMask(documents=(0, 8)),
        AttentionMask.tree((0, 8), (-1,)),
        AttentionMask.prefix((0, 8), (0,)),
        AttentionMask.chunked(8),
        AttentionMask.chunked(8, origin="row"),
        AttentionMask.image_spans([]),
        AttentionMask.blocks([[True]], 8, causal=True),
        AttentionMask.of_slices([Slice(range(8), range(8), None, 0)]),
        AttentionMask.rows([AttentionMask()]),
    ]
    assert len(set(same)) == len(same)
    assert all(torch.equal(oracle_pairs(mask, 8)[0], oracle_pairs(same[0], 8)[0]) for mask in same)


def test_a_prefix_without_documents_is_of_one_document():
    mask = AttentionMask(pattern=Prefix((3,)))
    assert np.array_equal(mask.slices(8)[0], AttentionMask.prefix((0, 8), (3,)).slices(8)[0])
    assert torch.equal(mask.visible(torch.arange(8), torch.arange(8)), oracle_pairs(mask, 8)[0])


@pytest.mark.parametrize("convert", [np.array, torch.tensor])
def test_repeated_boundaries_are_empty_documents(convert):
    """Libraries pad cu_seqlens to a fixed size by repeating the last boundary."""
    assert AttentionMask(documents=convert((0, 0, 5, 5, 8, 8, 8))) == AttentionMask(documents=(0, 5, 8))
    rows = AttentionMask(documents=convert(((0, 5, 8, 8), (0, 2, 4, 8))))
    assert rows.documents == ((0, 5, 8), (0, 2, 4, 8))
    assert AttentionMask.chunked(3, convert((0, 5, 8, 8))) == AttentionMask.chunked(3, (0, 5, 8))
    assert AttentionMask.prefix(convert((0, 5, 8, 8)), (2, 0)) == AttentionMask.prefix((0, 5, 8), (2, 0))


def test_arguments_may_be_tensors_and_arrays():
    documents, spans = (0, 3, 8), [range(4, 6)]
    drawn_masks = [
        (AttentionMask.tree, (documents, (-1, 0))),
        (AttentionMask.prefix, (documents, (2, 0))),
        (AttentionMask.chunked, (3, documents)),
    ]
    for make, arguments in drawn_masks:
        plain = make(*arguments)
        for convert in (np.array, torch.tensor, list):
            assert make(*(convert(x) if isinstance(x, tuple) else x for x in arguments)) == plain
    assert AttentionMask.tree(range(0, 9, 4), range(-1, 1)) == AttentionMask.tree((0, 4, 8), (-1, 0))
    assert AttentionMask.image_spans(spans, torch.tensor(documents)) == AttentionMask.image_spans(spans, documents)
    table = [[True, False], [True, True]]
    for convert in (np.array, torch.tensor):
        assert AttentionMask.blocks(convert(table), np.int64(4)) == AttentionMask.blocks(table, 4)
    assert AttentionMask.of_slices([(range(3), range(4), np.int64(-2), None)]) == AttentionMask.of_slices(
        [Slice(range(3), range(4), -2, None)]
    )


# -- rebuilding by FSDP2 ----------------------------------------------------------------------------------------------


def rebuilt(mask: AttentionMask) -> AttentionMask:
    """Rebuilds a mask as FSDP2 does when it casts the tensors of a module's arguments."""
    return _apply_to_tensors(lambda x: x, [mask])[0]  # pyright: ignore[reportIndexIssue]


def steps_of(call: Callable[[], object]) -> int:
    """Counts the Python bytecodes that run in a call."""
    count = 0

    def each(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return each

    before = sys.gettrace()
    sys.settrace(each)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def sized(count: int) -> dict[str, AttentionMask]:
    """Returns a mask of each kind with `count` parts."""
    ends, length = (*range(0, 3 * count + 1, 3),), 3 * count
    rows = [AttentionMask(documents=ends), AttentionMask.tree(ends, (*range(-1, count - 1),))]
    return {
        "documents": rows[0],
        "rows of documents": AttentionMask(documents=[ends, (0, length)]),
        "slices": AttentionMask.of_slices([Slice(range(a, a + 3), range(a, a + 3), None, 0) for a in ends[:-1]]),
        "tree": rows[1],
        "prefix": AttentionMask.prefix(ends, [2] * count),
        "chunked": AttentionMask.chunked(2, ends),
        "image-spans": AttentionMask.image_spans([range(a, a + 2) for a in ends[:-1]], ends),
        "blocks": AttentionMask.blocks(np.eye(min(count, 100), dtype=bool), -(-length // min(count, 100)), length),
        "rows": AttentionMask.rows(rows),
    }


def test_rebuilding_hashing_and_comparing_do_not_iterate_over_parts():
    few, many = sized(2), sized(10_000)
    for name, mask in many.items():
        for change in (replace, rebuilt, lambda mask: replace(mask, window=(4, 0)), lambda mask: mask.narrow(4)):
            assert steps_of(lambda: change(mask)) <= steps_of(lambda: change(few[name])) + 20, name  # noqa: B023
        hash(mask)
        other = rebuilt(mask)
        assert steps_of(lambda: hash(other)) + steps_of(lambda: mask == other) < 500, name  # noqa: B023
        assert other == mask and hash(other) == hash(mask)


# -- slices and segments ----------------------------------------------------------------------------------------------


def test_overlapping_slices_are_reported():
    for seed in range(200):
        random = Random(seed)
        slices = [drawn_slice(random) for _ in range(random.randint(2, 5))]
        count = sum(counted(np.array([row(each)]), 12, 12) for each in slices)
        if count.max() <= 1:
            AttentionMask.of_slices(slices)
            continue
        with pytest.raises(ValueError, match="query") as refused:
            AttentionMask.of_slices(slices)
        words = str(refused.value).split(";")[0].split()
        assert count[int(words[words.index("query") + 1]), int(words[words.index("key") + 1])] > 1, refused.value


def drawn_slice(random: Random) -> Slice:
    """Draws a slice, small enough that two of them are often disjoint."""
    ranges = [range(start, start + random.randint(1, 5)) for start in (random.randint(0, 7), random.randint(0, 7))]
    low, high = (random.choice((None, random.randint(-7, 7))) for _ in range(2))
    return Slice(*ranges, low, high)


def row(mask_slice: Slice) -> list[int]:
    queries, keys, low, high = mask_slice
    bounds = -99 if low is None else low, 99 if high is None else high
    return [queries.start, queries.stop, keys.start, keys.stop, *bounds]


def test_segments_of_documents_and_trees():
    tree = AttentionMask.tree([0, 3, 5, 8], [-1, 0, 0])
    assert [row.ends for row in AttentionMask().segments(8)] == [(0, 8)]
    assert [row.parents for row in AttentionMask(documents=[0, 3, 8]).segments(8)] == [(-1, -1)]
    rows = AttentionMask.rows([tree, AttentionMask(documents=[0, 2, 8])]).segments(8)
    assert [(row.ends, row.parents) for row in rows] == [((0, 3, 5, 8), (-1, 0, 0)), ((0, 2, 8), (-1, -1))]
