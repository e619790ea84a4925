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
        # Trimmed: no bound that hides nothing, so that a full rectangle has none and is computed without a mask.
        assert tile.area == pairs.sum() and tile == tile.trim(), tile
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

contiguous, zigzag, striped = SequenceLayout.contiguous, SequenceLayout.zigzag, SequenceLayout.striped
LOWER = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
FEWEST = {
    **{f"full, {make.__name__}": (make(40, 4), FULL, [[1] * 4] * 4) for make in (contiguous, zigzag, striped)},
    "contiguous": (contiguous(40, 4), CAUSAL, LOWER),
    **{f"zigzag on {n}": (zigzag(6 * n, n), CAUSAL, [[1] * n] * n) for n in (1, 3, 8)},
    "striped": (striped(40, 4), CAUSAL, [[1] * 4] * 4),
    "refined zigzag": (zigzag(64, 2).refine(2), CAUSAL, [[1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 1, 1]]),
    "documents": (contiguous(32, 2), AttentionMask(documents=(0, 8, 16, 32)), [[2, 0], [0, 1]]),
    "window": (contiguous(32, 1), AttentionMask(window=(5, None)), [[1]]),
}
"""Layouts and masks with the number of tiles of each query shard and key shard."""


@pytest.mark.parametrize("name", FEWEST)
def test_cells_have_as_few_tiles_as_possible(name):
    layout, mask, counts = FEWEST[name]
    grid, shards = Grid(layout, layout, mask), range(layout.shards)
    assert [[len(grid.tiles(i, j, 0)) for j in shards] for i in shards] == counts


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
