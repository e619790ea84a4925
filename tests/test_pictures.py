"""The scripts of docs/tools: numbers in pictures are those of masks and communication plans, and pages are current."""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
import torch

from armillary.attention import AttentionMask, AttentionShape, build_comm_plan
from armillary.core import SequenceLayout
from armillary.core.testing import refusal
from armillary.train.logs import Journal
from armillary.train.metrics import StepMetrics

DOCS = Path(__file__).parent.parent / "docs"
N = 48
TREE = AttentionMask.tree([0, 10, 18, 26, 33, N], [-1, 0, 0, 2, 0])
WORDS = {
    "plain": ("--documents 0,7,30,48 --window 9,none", AttentionMask(window=(9, None), documents=[0, 7, 30, N])),
    "tree": ("tree --ends 0,10,18,26,33,48 --parents none,0,0,2,0", TREE),
    "prefix": ("prefix --documents 0,20,48 --prefixes 8,0", AttentionMask.prefix([0, 20, N], [8, 0])),
    "chunked": ("chunked --size 7 --documents 0,20,48", AttentionMask.chunked(7, documents=[0, 20, N])),
    "image-spans": (
        "image-spans --spans 4:11,20:30 --length 48",
        AttentionMask.image_spans([range(4, 11), range(20, 30)]),
    ),
    "blocks": ("blocks --visible 10,11 --block 24", AttentionMask.blocks([[True, False], [True, True]], 24)),
    "slices": ("slices --slice 0:30,0:10,-20,3 --slice 40:48,0:48", None),
}


def tool(name: str):
    if str(DOCS / "tools") not in sys.path:
        sys.path.append(str(DOCS / "tools"))  # scripts import their neighbours
    return importlib.import_module(name)


# -- masks ------------------------------------------------------------------------------------------------------------


def dense(mask: AttentionMask) -> np.ndarray:
    return mask.visible(torch.arange(N), torch.arange(N)).numpy()


@pytest.mark.parametrize("method", ["ring", "wallfacer", "usp"])
def test_ranks_compute_the_blocks_of_the_communication_plan(method):
    cells, layout = tool("mask_cells"), SequenceLayout.zigzag(N, 4)
    shares = cells.shares_of(TREE, layout, method)
    work = AttentionShape.of(layout, TREE, heads=2, kv_heads=2, head_dim=8, dtype=torch.float32)
    planned = [step.pairs for step in build_comm_plan(method, work, ring=4).forward if step.pairs]
    assert planned == [tuple(2 * pairs for pairs in step) for step in zip(*shares.by_step, strict=True)]
    assert sum(shares.by_rank) == TREE.pairs(N) and shares.imbalance == max(shares.by_rank) * 4 / shares.pairs
    blocks = cells.blocks_of(layout, TREE, method)
    computed = cells.ComputedCells.of(blocks, TREE, cells.cell_edges(N, N), 4)
    assert np.array_equal(computed.by_rank.sum(axis=0), dense(TREE))
    assert tuple(computed.by_rank.sum(axis=(1, 2))) == shares.by_rank
    assert all(computed.step[int(label.y), int(label.x)] == label.step for label in computed.labels())


def test_the_command_draws_each_kind_of_mask(tmp_path, capsys):
    main, kinds = tool("draw_mask").main, tool("draw_mask").KINDS
    assert set(WORDS) == set(kinds)
    for kind, (line, mask) in WORDS.items():
        written = tmp_path / f"{kind}.json"
        picture = ["--out", str(tmp_path / "tree.svg")] if kind == "tree" else []
        assert main([*line.split(), "--layout", "striped", "--ranks", "4", "--json", str(written), *picture]) == 0
        numbers = json.loads(written.read_text())
        assert sum(numbers["by_rank"]) == numbers["pairs"] and numbers["length"] == N
        assert mask is None or numbers["pairs"] == mask.pairs(N)
        assert f"{numbers['imbalance']:.3f}" in capsys.readouterr().out
    assert (tmp_path / "tree.svg").read_text().startswith("<?xml")
    refused = (("", "--length"), ("--length 8 --out mask.gif", "mask.gif"), ("--length 8 --ranks 2 --layout x", "x"))
    for words, error in refused:
        assert error in refusal(main, words.split())


@pytest.mark.long  # reproduces the pictures of docs/masks.md
def test_the_pictures_of_the_page_of_masks_are_drawn(tmp_path):
    tool("draw_masks_page").main(tmp_path)
    shown = re.findall(r"\]\(pictures/(\w+\.png)\)", (DOCS / "masks.md").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(shown)
    for name in shown:
        assert matplotlib.image.imread(tmp_path / name).shape == matplotlib.image.imread(DOCS / "pictures" / name).shape


# -- steps ------------------------------------------------------------------------------------------------------------


def page_commands() -> dict[str, list[str]]:
    """Returns the flags of each page of docs/steps.md by its name."""
    (table,) = re.findall(r"<<'METHODS'\n(.*?)METHODS\n", (DOCS / "steps.md").read_text(), re.S)
    return {words[0]: words[1:] for words in map(shlex.split, table.splitlines())}


@pytest.mark.parametrize("name", page_commands())
def test_pages_of_steps_are_current_and_load_nothing(name, tmp_path):
    for kind in ("html", "svg"):
        written = tmp_path / f"{name}.{kind}"
        tool("draw_steps").main([*page_commands()[name], "--out", str(written)])
        assert written.read_bytes() == (DOCS / "pictures/steps" / written.name).read_bytes()
    elements = list(ElementTree.parse(tmp_path / f"{name}.svg").iter())
    ids = [element.get("id") for element in elements if element.get("id")]
    assert len(set(ids)) == len(ids) and {e.get("href")[1:] for e in elements if e.get("href")} <= set(ids)
    page = (tmp_path / f"{name}.html").read_text("utf-8")
    assert not re.search(r"url\(|@import|\bsrc=|//", re.sub(r"(?m)^\s*//.*$", "", page))


def test_the_picture_of_the_readme_is_current(tmp_path):
    (line,) = re.findall(r"draw_steps\.py (.*) --out docs/pictures/methods\.svg", (DOCS / "steps.md").read_text())
    tool("draw_steps").main([*line.split(), "--out", str(tmp_path / "methods.svg")])
    assert (tmp_path / "methods.svg").read_bytes() == (DOCS / "pictures/methods.svg").read_bytes()


def test_wrong_arguments_are_named():
    for line, part in (
        ("--attention wallfacer --team 3", "team=3"),
        ("--attention usp --ulysses 3", "--ulysses 3"),
        ("--ranks 65", "--ranks"),
        ("--full --chunk 8", "--full"),
        ("--attention ring usp --out steps.html", "--out steps.html"),
    ):
        assert part in refusal(tool("draw_steps").main, line.split())


# -- runs -------------------------------------------------------------------------------------------------------------


def test_runs_are_drawn_over_each_other(tmp_path):
    for name, losses in (("ring", [5.0, float("nan"), 3.0]), ("upipe", [4.0])):
        (tmp_path / name).mkdir()
        written = Journal(tmp_path / name / "metrics.jsonl")
        for step, loss in enumerate(losses, 1):
            written.step(StepMetrics(step, loss, 1.0 / step, 1e-3, 1, 1.0, 1.0, None, 1.0, step))
        written.on_validation(1, {"loss": 5.5})
        written.close()
    runs = tool("plot_runs")
    curves = runs.read_curves(tmp_path / "ring")
    assert curves.steps == [1, 2, 3] and np.isnan(curves.loss[1]) and curves.validation == {1: 5.5}
    runs.main([str(tmp_path / "ring"), str(tmp_path / "upipe"), "--output", str(tmp_path / "losses.png")])
    assert matplotlib.image.imread(tmp_path / "losses.png").shape == (780, 1080, 4)
