"""Pictures of masks: their counts, compared with dense masks and communication plans, and refusals."""

import json
import sys

import numpy as np
import pytest
import torch

from armillary.attention import AttentionMask, AttentionShape, Slice, build_comm_plan, draw_mask
from armillary.attention.drawing import shares_of
from armillary.attention.drawing.cells import KeyCells, cell_edges, count_pairs, count_positions
from armillary.attention.drawing.colors import blend, rank_colors
from armillary.attention.drawing.computed_cells import ComputedCells
from armillary.attention.drawing.shares import blocks_of
from armillary.core import SequenceLayout
from scripts.draw_mask import KINDS, main

N = 48
MASKS = {
    "plain": AttentionMask(window=(9, None), documents=[0, 7, 30, N]),
    "tree": AttentionMask.tree([0, 10, 18, 26, 33, N], [-1, 0, 0, 2, 0]),
    "windowed tree": AttentionMask.tree([0, 10, 18, 26, 33, N], [-1, 0, 0, 2, 0], window=(12, 0)),
    "prefix": AttentionMask.prefix([0, 20, N], [8, 0]),
    "chunked": AttentionMask.chunked(7, documents=[0, 20, N]),
    "image-spans": AttentionMask.image_spans([range(4, 11), range(20, 30)], documents=[0, 13, N], window=(15, 0)),
    "blocks": AttentionMask.blocks([[1 == 1, False], [True, True]], 24),
    "slices": AttentionMask.of_slices([Slice(range(30), range(10), -20, 3), Slice(range(40, N), range(N))]),
    "rows": AttentionMask.rows([AttentionMask(), AttentionMask(documents=[0, 5, N])]),
}
LAYOUTS = [SequenceLayout.zigzag(N, 4), SequenceLayout.striped(N, 4), SequenceLayout.striped(N, 4, stripe=5)]


def dense(mask: AttentionMask) -> np.ndarray:
    return mask.visible(torch.arange(N), torch.arange(N)).numpy()


def summed(cells: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return np.add.reduceat(np.add.reduceat(cells.astype(np.int64), edges[:-1], axis=0), edges[:-1], axis=1)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_cells_count_the_visible_pairs(mask):
    for cells in (N, 7):
        edges = cell_edges(N, cells)
        assert np.array_equal(count_pairs(mask.slices(N)[0], edges), summed(dense(mask), edges))
        for layout in LAYOUTS:
            keys = KeyCells([layout.spans(shard) for shard in range(4)], edges)
            for query in range(4):
                for key, actual in enumerate(keys.pairs(layout.spans(query), mask.slices(N)[0])):
                    block = np.zeros((N, N), dtype=bool)
                    block[np.ix_(layout.positions(query), layout.positions(key))] = True
                    assert np.array_equal(actual, summed(dense(mask) & block, edges))


@pytest.mark.parametrize("method", ["ring", "token_ring", "wallfacer", "all_gather", "usp"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["zigzag", "striped", "stripes"])
def test_ranks_compute_the_blocks_of_the_communication_plan(method, layout):
    for mask in (MASKS["plain"], MASKS["tree"], AttentionMask(causal=False)):
        work_shares = shares_of(mask, layout, method)
        work = AttentionShape.of(layout, mask, heads=2, kv_heads=2, head_dim=8, dtype=torch.float32)
        plan = build_comm_plan(method, work, ring=4)
        planned = [step.pairs for step in plan.forward if step.pairs]
        assert planned == [tuple(2 * pairs for pairs in step) for step in zip(*work_shares.by_step, strict=True)]
        assert sum(work_shares.by_rank) == work_shares.pairs == mask.pairs(N)
        assert work_shares.imbalance == max(work_shares.by_rank) * 4 / work_shares.pairs
        who = ComputedCells.of(blocks_of(layout, mask, method), mask, cell_edges(N, N), 4)
        assert np.array_equal(who.by_rank.sum(axis=0), dense(mask))
        assert tuple(who.by_rank.sum(axis=(1, 2))) == work_shares.by_rank
        by_step = [int(who.by_rank[rank][who.step == 0].sum()) for rank in range(4)]
        assert by_step == [its[0] for its in work_shares.by_step]


def test_numbers_are_at_the_blocks_of_their_step():
    layout = SequenceLayout.zigzag(N, 4)
    who = ComputedCells.of(blocks_of(layout, AttentionMask(), "ring"), AttentionMask(), cell_edges(N, N), 4)
    labels = list(who.labels())
    assert len(labels) == 7 * 8 // 2  # seven runs of 6 tokens, because the last rank's two are one
    for label in labels:
        assert dense(AttentionMask())[int(label.y), int(label.x)] and who.step[int(label.y), int(label.x)] == label.step


@pytest.mark.parametrize("name", MASKS)
def test_each_kind_is_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    assert draw_mask(MASKS[name], N, tmp_path / "mask.png") is None
    work_shares = draw_mask(MASKS[name], N, tmp_path / "layout.png", LAYOUTS[0])
    assert work_shares == shares_of(MASKS[name], LAYOUTS[0])
    assert all((tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in ("mask", "layout"))


def test_a_million_tokens_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    mask, length = AttentionMask(documents=range(0, 1_000_001, 1000)), 1_000_000
    work_shares = draw_mask(mask, length, tmp_path / "mask.svg", SequenceLayout.zigzag(length, 8))
    assert work_shares is not None and sum(work_shares.by_rank) == mask.pairs(length)
    assert (tmp_path / "mask.svg").read_text().startswith("<?xml")


def test_faint_cells_have_few_pairs():
    cells = blend(np.array([[0, 1, 4], [0, 0, 4]]), np.array([8, 8, 8]), rank_colors(2))
    assert cells[0, 3] == 0 and 0 < cells[1, 3] < cells[2, 3] == 1
    assert np.allclose(cells[1, :3], rank_colors(2)[0]) and np.allclose(cells[2, :3], rank_colors(2).mean(axis=0))
    assert len(np.unique(rank_colors(40), axis=0)) == 40


def test_cells_cover_each_position_once():
    edges = cell_edges(N, 5)
    for layout in LAYOUTS:
        assert np.array_equal(sum(count_positions(layout.spans(shard), edges) for shard in range(4)), np.diff(edges))


COMMANDS = {
    "plain": ("--documents 0,7,30,48 --window 9,none", MASKS["plain"]),
    "tree": ("tree --ends 0,10,18,26,33,48 --parents none,0,0,2,0 --window 12,0", MASKS["windowed tree"]),
    "prefix": ("prefix --documents 0,20,48 --prefixes 8,0", MASKS["prefix"]),
    "chunked": ("chunked --size 7 --documents 0,20,48", MASKS["chunked"]),
    "image-spans": ("image-spans --spans 4:11,20:30 --documents 0,13,48 --window 15,0", MASKS["image-spans"]),
    "blocks": ("blocks --visible 10,11 --block 24", MASKS["blocks"]),
    "slices": ("slices --slice 0:30,0:10,-20,3 --slice 40:48,0:48", MASKS["slices"]),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_command_draws_each_kind_and_prints_its_numbers(kind, tmp_path, capsys):
    line, mask = COMMANDS[kind]
    assert main([*line.split(), "--layout", "striped", "--ranks", "4", "--json", str(tmp_path / "x.json")]) == 0
    actual, work_shares = json.loads((tmp_path / "x.json").read_text()), shares_of(mask, LAYOUTS[1])
    assert (actual["length"], actual["pairs"]) == (N, mask.pairs(N))
    assert (actual["by_rank"], actual["imbalance"]) == (list(work_shares.by_rank), work_shares.imbalance)
    assert f"{work_shares.imbalance:.3f}" in capsys.readouterr().out
    assert set(COMMANDS) == set(KINDS)


def test_the_command_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["--length", "1k", "--not-causal", "--out", str(tmp_path / "full.pdf")]) == 0
    assert (tmp_path / "full.pdf").read_bytes()[:4] == b"%PDF"
    assert capsys.readouterr().out == "1,000,000 of 1,000,000 pairs are visible\n"


def test_invalid_drawings_are_refused(tmp_path):
    mask, path = AttentionMask(), tmp_path / "mask.png"
    with pytest.raises(ValueError, match=r"mask.gif.*.png"):
        draw_mask(mask, N, tmp_path / "mask.gif")
    with pytest.raises(ValueError, match="there is no folder"):
        draw_mask(mask, N, tmp_path / "none" / "mask.png")
    with pytest.raises(ValueError, match=r"layout has 48 tokens.* 47"):
        draw_mask(mask, N - 1, path, LAYOUTS[0])
    with pytest.raises(ValueError, match=r"48.*47"):
        draw_mask(MASKS["plain"], N - 1, path)
    with pytest.raises(ValueError, match=r"ulysses.*'ring'.*4"):
        draw_mask(mask, N, path, LAYOUTS[0], "ulysses")
    assert not path.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "--length is needed"),
        ("tree --ends 0,4,8 --parents none,5", "parent 5 of segment 1"),
        ("--length 8 --layout round --ranks 2", "no layout 'round'"),
        ("--length 8 --out mask.gif", "mask.gif"),
    ],
)
def test_invalid_commands_print_one_line(line, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_the_error_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"armillary-attention\[plot\]"):
        draw_mask(AttentionMask(), N, tmp_path / "mask.png")
    assert not (tmp_path / "mask.png").exists()
