"""Tiles cover every visible pair once and no other pair, and their number is minimal."""

from itertools import pairwise, product
from random import Random

import pytest
import torch

from armillary.attention import AttentionMask
from armillary.attention.reference import visible_pairs
from armillary.attention.tiling.grid import Grid, PartialLayout
from armillary.core import SequenceLayout
from conformance.draw_masks import drawn_mask
from conformance.tensors import drawn_layout, drawn_sizes

FULL, CAUSAL = AttentionMask(causal=False), AttentionMask()


def covered(tile, queries: int, keys: int) -> torch.Tensor:
    """Pairs of one tile: bool [T, S] over local indices."""
    a, b = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    inside = (tile.q0 <= a) & (a < tile.q1) & (tile.k0 <= b) & (b < tile.k1)
    from_low = torch.ones_like(inside) if tile.low is None else b - a >= tile.low
    up_to_high = torch.ones_like(inside) if tile.high is None else b - a <= tile.high
    return inside & from_low & up_to_high


def check_cover(
    queries: SequenceLayout, i: int, keys: SequenceLayout, j: int, mask: AttentionMask, row: int = 0
) -> None:
    """Asserts that tiles have each pair of the oracle once and no others, and that they are canonical."""
    parts = Grid(queries, keys, mask).tiles(i, j, row if mask.per_row else 0)
    rows, columns = queries.positions(i), keys.positions(j)
    count = torch.zeros(len(rows), len(columns), dtype=torch.long)
    for tile in parts:
        assert 0 <= tile.q0 < tile.q1 <= len(rows) and 0 <= tile.k0 < tile.k1 <= len(columns), tile
        pairs = covered(tile, len(rows), len(columns))
        assert tile.area == pairs.sum(), tile
        used = pairs[tile.q0 : tile.q1, tile.k0 : tile.k1]
        assert used.any(1).all() and used.any(0).all(), f"{tile} has a row or a column without visible pairs"
        count += pairs
    visible = visible_pairs(mask, rows, columns, batch=2)
    expected = visible[min(row, len(visible) - 1)].long()
    assert torch.equal(count, expected), f"covered {count.tolist()}, visible {expected.tolist()}: {parts}"


# -- random layouts and masks -----------------------------------------------------------------------------------------


def any_cell(seed: int) -> tuple[SequenceLayout, SequenceLayout, AttentionMask, Random]:
    """Draws layouts of queries and keys, half of the time equal, and a mask of any kind for a batch of two."""
    random = Random(seed)
    length, shards = random.randint(1, 40), random.randint(1, 5)
    same_layout = random.random() < 0.5
    keys = length if same_layout or random.random() < 0.5 else random.randint(1, 40)
    layout = any_layout(random, length, min(shards, length, keys))
    key_layout = layout if same_layout else any_layout(random, keys, layout.shards)
    return layout, key_layout, drawn_mask(random, length, keys, batch=2), random


def any_layout(random: Random, length: int, shards: int) -> SequenceLayout:
    kind = random.choice(("contiguous", "zigzag", "striped", "uneven", "spans"))
    if kind in ("uneven", "spans"):
        return drawn_layout(random, drawn_sizes(random, length, shards, 1), kind)
    return getattr(SequenceLayout, kind)(length, shards)


def test_every_cell_of_any_layouts_under_any_kind_of_mask():
    for seed in range(100):
        layout, key_layout, mask, random = any_cell(seed)
        grid, row = Grid(layout, key_layout, mask), random.randint(0, 1)
        for i, j in product(range(layout.shards), range(key_layout.shards)):
            check_cover(layout, i, key_layout, j, mask, row)
            pairs = visible_pairs(mask, layout.positions(i), key_layout.positions(j), batch=2).expand(2, -1, -1)
            assert grid.pairs(i, j, batch=2) == pairs.sum(), (seed, mask)
            for runs, tokens in zip(grid.visible(i, j), (pairs.any(0).any(1), pairs.any(0).any(0)), strict=True):
                assert all(runs) and all(a.stop < b.start for a, b in pairwise(runs)), (seed, mask)
                assert [at for run in runs for at in run] == tokens.nonzero().flatten().tolist(), (seed, mask)


# -- as few as possible -----------------------------------------------------------------------------------------------


def tiles_of(layout: SequenceLayout, i: int, j: int, mask: AttentionMask = CAUSAL) -> tuple:
    return Grid(layout, layout, mask).tiles(i, j, 0)


def area(layout: SequenceLayout, i: int, j: int, mask: AttentionMask = CAUSAL) -> int:
    sizes = layout.sizes[i], layout.sizes[j]
    return sum(int(covered(tile, *sizes).sum()) for tile in tiles_of(layout, i, j, mask))


def is_rectangle(tile) -> bool:
    rows, columns = tile.q1 - tile.q0, tile.k1 - tile.k0
    return int(covered(tile, tile.q1, tile.k1).sum()) == rows * columns


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_without_a_mask_every_cell_is_one_full_rectangle(kind):
    layout = getattr(SequenceLayout, kind)(40, 4)
    for i, j in product(range(4), range(4)):
        (tile,) = tiles_of(layout, i, j, FULL)
        assert (tile.q0, tile.q1, tile.k0, tile.k1, tile.low, tile.high) == (0, 10, 0, 10, None, None)


def test_contiguous_causal_tiles_are_squares_on_the_diagonal_and_rectangles_below():
    layout = SequenceLayout.contiguous(40, 4)
    for i, j in product(range(4), range(4)):
        assert len(tiles_of(layout, i, j)) == (i >= j)
        assert area(layout, i, j) == (55 if i == j else 100 if i > j else 0)
    assert tiles_of(layout, 1, 1)[0].low is None and tiles_of(layout, 1, 1)[0].high == 0
    assert is_rectangle(tiles_of(layout, 2, 1)[0])


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
def test_zigzag_causal_is_one_tile_in_every_cell(shards):
    layout = SequenceLayout.zigzag(6 * shards, shards)
    for i, j in product(range(shards), range(shards)):
        (tile,) = tiles_of(layout, i, j)
        if i == j:
            assert (tile.q0, tile.q1, tile.k0, tile.k1, tile.low, tile.high) == (0, 6, 0, 6, None, 0)
        elif i > j:
            assert (tile.q0, tile.q1, tile.k0, tile.k1) == (0, 6, 0, 3) and is_rectangle(tile)
        else:
            assert (tile.q0, tile.q1, tile.k0, tile.k1) == (3, 6, 0, 6) and is_rectangle(tile)


def test_striped_causal_has_one_tile_per_block_shifted_by_one_above_the_diagonal():
    layout = SequenceLayout.striped(40, 4)
    for i, j in product(range(4), range(4)):
        (tile,) = tiles_of(layout, i, j)
        assert tile.low is None and area(layout, i, j) == (55 if i >= j else 45)


def test_refined_zigzag_shards_have_one_tile_per_pair_of_spans():
    layout = SequenceLayout.zigzag(64, 2).refine(2)
    counts = [[len(tiles_of(layout, i, j)) for j in range(4)] for i in range(4)]
    assert max(map(max, counts)) == 1, counts


def test_neighbouring_unsplit_documents_have_one_tile_each():
    layout = SequenceLayout.contiguous(32, 2)
    mask = AttentionMask(documents=(0, 8, 16, 32))
    assert [[len(tiles_of(layout, i, j, mask)) for j in range(2)] for i in range(2)] == [[2, 0], [0, 1]]


def test_a_causal_window_on_one_shard_is_one_band():
    (tile,) = tiles_of(SequenceLayout.contiguous(32, 1), 0, 0, AttentionMask(window=(5, None)))
    assert (tile.low, tile.high) == (-5, 0)


def test_an_empty_shard_has_no_tiles():
    for queries, keys in (((range(3),), ()), ((), (range(3),)), ((), ())):
        layouts = (PartialLayout([spans], length=3) for spans in (queries, keys))
        assert Grid(*layouts, AttentionMask()).tiles(0, 0, 0) == ()


def test_pairs_beyond_64_bits_are_exact():
    length, shards = 10**12, 4
    zigzag, mask = SequenceLayout.zigzag(length, shards), AttentionMask()
    grid = Grid(zigzag, zigzag, mask)
    total = length * (length + 1) // 2
    assert sum(grid.pairs(i, j, batch=3) for i, j in product(range(shards), repeat=2)) == 3 * total
    assert mask.pairs(length) == total
