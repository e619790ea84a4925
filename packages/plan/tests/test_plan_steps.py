"""Pages and pictures of methods agree with communication plans and tiles; they load nothing from the network."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from gathered_queries import GatheredQueriesPlan

from armillary.attention import AttentionMask, AttentionShape, build_comm_plan
from armillary.attention.mask.layouts import layout_of
from armillary.attention.planning.comm_plan import CommPlan, Role
from armillary.attention.registry import names
from armillary.attention.tiling.tiles import tiles
from armillary.core import SequenceLayout
from armillary.core.observe.ledger import KINDS
from armillary.plan.cli import main
from armillary.plan.steps.cells import MaskCells, outline
from armillary.plan.steps.command import StepsOptions, plan_steps
from armillary.plan.steps.draw import span_text
from armillary.plan.steps.page import script_json
from armillary.plan.steps.timeline import timeline

RANKS, N = 8, 64
TREE = {"documents": (0, 8, 40, 64), "parents": (-1, 0, 0)}
MASKS = {
    "causal": {},
    "full": {"full": True},
    "window": {"window": (5, 0)},
    "documents": {"documents": (0, 20, 50, N)},
    "tree": TREE,
    "prefix": {"documents": (0, 20, N), "prefixes": (4, 9)},
    "chunk": {"chunk": 12},
}


def comm_plan(plan: StepsOptions, mesh: dict[str, int]) -> tuple[CommPlan, SequenceLayout]:
    """Builds the plan and layout from the arguments without the command's code."""
    layout = getattr(SequenceLayout, plan.layout)(N, mesh["ring"])
    sizes = {"heads": plan.heads, "kv_heads": plan.kv_heads or plan.heads, "head_dim": plan.head_dim}
    work = AttentionShape.of(layout, plan.mask, **sizes, dtype=torch.bfloat16)
    return build_comm_plan(plan.attention[0], work, **mesh), layout


@pytest.mark.parametrize("name", [name for name in names() if name not in ("local", "ulysses+ring")])
@pytest.mark.parametrize("mask", MASKS)
def test_frames_have_the_bytes_and_pairs_of_the_plan(name, mask):
    team = {"team": 1} if "wallfacer" in name else {}  # teams of one, with the zigzag layout
    plan = StepsOptions(attention=(name,), tokens=N, kv_heads=4, **team, **MASKS[mask])
    (steps,) = plan_steps(plan)
    if team:
        plan = StepsOptions(attention=(name.replace("wallfacer", "ring"),), tokens=N, kv_heads=4, **MASKS[mask])
    expected, layout = comm_plan(plan, steps.facts["mesh"])
    last = {(entry.axis, entry.kind): entry for entry in steps.frames[-1].sent_bytes}
    for axis in get_args(Role):
        for kind in KINDS:
            by_rank = [expected.bytes(rank, kind, axis=axis) for rank in range(RANKS)]
            entry = last.get((axis, kind))
            assert (entry.total, entry.busiest) == (sum(by_rank), max(by_rank)) if entry else not any(by_rank)
    for phase in ("forward", "backward"):
        pairs = sum(block.pairs for frame in steps.frames if frame.phase == phase for block in frame.blocks)
        assert pairs == plan.mask.pairs(N) * plan.heads
    cells = MaskCells.of(layout, plan.mask)
    for frame in steps.frames:
        for block in frame.blocks:
            assert block.pairs == len(block.heads) * cells.block(block.queries, block.keys).sum()


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped", "balanced"])
@pytest.mark.parametrize("mask", MASKS)
def test_cells_of_a_block_are_its_tiles(kind, mask):
    plan = StepsOptions(tokens=N, **MASKS[mask])
    layout = layout_of(kind, N, 4, plan.mask)
    cells = MaskCells.of(layout, plan.mask)
    assert len(cells.positions) == N
    for query in range(4):
        for key in range(4):
            expected = np.zeros((N, N), bool)
            rows, columns = layout.positions(query).numpy(), layout.positions(key).numpy()
            for tile in tiles(layout.spans(query), layout.spans(key), plan.mask):
                for a in range(tile.q0, tile.q1):
                    low = tile.k0 if tile.low is None else max(tile.k0, a + tile.low)
                    high = tile.k1 if tile.high is None else min(tile.k1, a + tile.high + 1)
                    expected[rows[a], columns[low:high]] = True
            assert np.array_equal(cells.block([query], [key]), expected)


def test_an_outline_covers_its_cells_once():
    some = np.random.default_rng(0).random((9, 9)) < 0.5
    drawn = np.zeros((9, 9), int)
    for x, y, width, height, back in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h(-\d+)z", outline(some)):
        assert int(width) == -int(back)
        drawn[int(y) : int(y) + int(height), int(x) : int(x) + int(width)] += 1
    assert np.array_equal(drawn, some)


@pytest.mark.parametrize("kind", ["zigzag", "striped"])
def test_a_long_sequence_is_drawn_by_positions_of_all_shards(kind):
    layout = getattr(SequenceLayout, kind)(1 << 20, 6)
    cells = MaskCells.of(layout, AttentionMask(), ulysses=2)
    counts = np.bincount(cells.shards, minlength=6)
    assert len(cells.positions) == 60 and counts.min() == counts.max()
    assert (np.diff(cells.positions) > 0).all() and np.array_equal(cells.visible, np.tri(60, dtype=bool))
    for position, shard, owner in zip(cells.positions, cells.shards, cells.owners, strict=True):
        assert any(position in span for span in layout.spans(shard)) and owner // 2 == shard


class Page(HTMLParser):
    """Parses open elements, ids and URLs of a page."""

    VOID = frozenset({"meta", "input", "br", "path", "use", "rect", "circle"})

    def __init__(self) -> None:
        super().__init__()
        self.open, self.ids, self.references, self.data, self.loaded = [], [], [], "", []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.references += [values["href"]] if "href" in values else []
        self.loaded += [values[name] for name in ("src", "srcset", "action") if name in values]
        if tag not in self.VOID:
            self.open.append((tag, values.get("id")))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == ("script", "data"):
            self.data += data


@pytest.mark.parametrize("line", [
    "ring", "wallfacer --team 2", "upipe+ring --ulysses 2 --kv-heads 4", "usp --documents 0 8 40 64 --parents -1 0 0",
])  # fmt: skip
def test_the_page_parses_and_loads_nothing(line, tmp_path, capsys):
    path = tmp_path / "steps.html"
    main(["steps", "--attention", *line.split(), "--out", str(path), "--json"])
    text, page = path.read_text("utf-8"), Page()
    page.feed(text)
    page.close()
    assert not page.open and not page.loaded and len(set(page.ids)) == len(page.ids)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert "url(" not in text and "@import" not in text and "//" not in re.sub(r"(?m)^\s*//.*$", "", text)
    frames = json.loads(page.data)["frames"]
    assert frames == json.loads(capsys.readouterr().out)["methods"][0]["frames"]
    assert text.count('<figure class="frame">') == len(frames)


def test_json_cannot_end_its_element():
    value = {"title": "</script><!-- & \u2028"}
    assert json.loads(script_json(value)) == value and not set("<>&\u2028") & set(script_json(value))


def test_pictures_are_svg(tmp_path):
    for name, methods in (("one", "ring"), ("three", "ring wallfacer upipe")):
        path = tmp_path / f"{name}.svg"
        main(["steps", "--attention", *methods.split(), "--heads", "16", "--out", str(path)])
        elements = list(ElementTree.parse(path).iter())
        ids = [element.get("id") for element in elements if element.get("id")]
        assert len(set(ids)) == len(ids)
        assert {e.get("href")[1:] for e in elements if e.get("href")} <= set(ids)


def test_numbers_are_written_as_ranges():
    assert span_text((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8" and span_text(()) == ""


def test_a_plan_without_blocks_is_refused():
    work = AttentionShape.of(
        SequenceLayout.zigzag(32, 4), AttentionMask(), heads=2, kv_heads=2, head_dim=8, dtype=torch.float32
    )
    plan = GatheredQueriesPlan().comm_plan(work)
    assert sum(block.pairs for frame in timeline(plan, 2, 1) for block in frame.blocks) == 2 * 2 * work.mask.pairs(32)
    bare = CommPlan(tuple(step._replace(blocks=()) for step in plan.forward), plan.backward)
    with pytest.raises(ValueError, match="blocks"):
        timeline(bare, 2, 1)


@pytest.mark.parametrize(("line", "parts"), [
    ("--attention rang", ("rang", "ring")),
    ("--attention ring --team 2", ("team=2",)),
    ("--attention wallfacer --team 3", ("team=3",)),
    ("--attention usp --ulysses 3", ("--ulysses 3",)),
    ("--attention ring --ulysses 2", ("--ulysses 2",)),
    ("--ranks 65", ("--ranks", "65")),
    ("--ranks 0", ("--ranks", "0")),
    ("--tokens 0", ("0",)),
    ("--heads 6 --kv-heads 4", ("6", "4")),
    ("--attention ulysses --heads 4", ("4", "8")),
    ("--full --chunk 8", ("--full", "--chunk")),
    ("--documents 0 8 --tokens 64", ("8", "64")),
    ("--out steps.pdf", ("--out", "steps.pdf")),
    ("--attention ring usp --out steps.html", ("--out", "steps.html")),
    ("--out nowhere/steps.html", ("nowhere/steps.html",)),
])  # fmt: skip
def test_wrong_arguments_are_named(line, parts, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["steps", *line.split()])
    error = capsys.readouterr().err
    assert end.value.code == 2 and len(error.splitlines()) == 1 and all(part in error for part in parts)
    assert not list(Path().iterdir())
