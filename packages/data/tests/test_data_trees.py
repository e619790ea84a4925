"""Prompts with several completions: from JSONL to rows that contain each prompt once."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from data_stores import every_shard, single_rank_rows

from armillary.core import SequenceLayout
from armillary.data import ByteTokenizer, LabelTriples, PackedSequences, best_fit, greedy, one_per_row, open_store
from armillary.data.cli import main
from armillary.data.inspection.statistics import describe, measure_packings
from armillary.data.prepare import Preparation, prepare

END = ByteTokenizer().end_of_document
LINES = [
    {"prompt": "2 + 2 =", "completions": [" 4", {"text": " five", "weight": 0.5}, " 4"]},
    {"prompt": "who?", "train": True, "completions": ["me", "you"], "id": 7},
    {
        "text": "a",
        "children": [{"text": "bc", "children": [{"text": "d"}, {"text": "ef"}]}, {"text": "g", "train": False}],
    },
    {"text": "a plain document"},
    {"prompt": "xy", "completions": ["z" * n for n in range(1, 9)]},
]


def stored(folder, lines=LINES, **options):
    file = folder / "trees.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare(Preparation([file], folder / "store", **{"format": "trees"} | options), workers=1)
    return open_store(folder / "store")


def sequences(node, before=(), trained=()):
    """(tokens, whether each is a label, weight) of each root-to-leaf sequence of a line."""
    kind = next(name for name in ("prompt", "text") if name in node)
    text = list(node[kind].encode())
    children = node.get("completions", node.get("children", []))
    train = node.get("train", kind != "prompt")
    tokens, trained = (*before, *text), (*trained, *[train] * len(text))
    if not children:
        return [((*tokens, END), (*trained, train), node.get("weight", 1.0))]
    each = ({"text": child} if isinstance(child, str) else child for child in children)
    return [actual for child in each for actual in sequences(child, tokens, trained)]


def expected(lines):
    """Sums of weights over all sequences of `lines`, by (tokens before a label, label)."""
    actual = {}
    for line in lines:
        for tokens, trained, weight in sequences(line):
            for i in range(1, len(tokens)):
                if trained[i] and weight:
                    key = tokens[: i + 1]
                    actual[key] = actual.get(key, 0) + weight
    return actual


def path_of(row, place):
    """Returns the places of a row that a place sees, in order, from the documents and parents."""
    ends, parents = row
    piece = next(i for i, (a, b) in enumerate(pairwise(ends)) if a <= place < b)
    visible = list(range(ends[piece], place + 1))
    while (piece := parents[piece]) >= 0:
        visible = [*range(ends[piece], ends[piece + 1]), *visible]
    return visible


def actual_weights(batches, layout):
    """Returns the same sums as `expected` from the batches of all shards, and checks their positions."""
    actual, tokens = {}, layout.join([batch.tokens for batch in batches])
    positions = layout.join([batch.positions for batch in batches])
    rows = list(zip(batches[0].documents, batches[0].parents, strict=True))
    for shard, batch in enumerate(batches):
        size = batch.tokens.shape[1]
        assert batch.labels.shape == (len(rows), size)
        places = layout.positions(shard)
        triples = zip(
            batch.labels.positions.tolist(), batch.labels.labels.tolist(), batch.labels.weights.tolist(), strict=True
        )
        for at, label, weight in triples:
            i, place = at // size, int(places[at % size])
            path = path_of(rows[i], place)
            assert positions[i, place] == len(path) - 1
            key = (*tokens[i, path].tolist(), label)
            actual[key] = actual.get(key, 0) + weight
    return actual


def test_rows_contain_every_sequence_with_its_weights(tmp_path):
    store = stored(tmp_path)
    assert len(store) == len(LINES) and store.trees is not None
    rows = single_rank_rows(store, 60, packing=best_fit, rows_per_batch=2)
    assert rows.rows_per_epoch == 2
    batch = next(rows)
    assert isinstance(batch.labels, LabelTriples)
    assert actual_weights([batch], SequenceLayout.contiguous(60, 1)) == pytest.approx(expected(LINES))
    assert batch.labelled == pytest.approx(sum(expected(LINES).values()))
    parts = [batch.of_row(i) for i in range(2)]
    assert sum(part.labelled for part in parts) == pytest.approx(batch.labelled)
    assert [part.parents for part in parts] == [batch.parents[:1], batch.parents[1:]]


@pytest.mark.parametrize("kind", ["zigzag", "striped", "contiguous", "scattered"])
def test_shards_have_the_triples_of_their_own_tokens(tmp_path, kind):
    store = stored(tmp_path)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
    layout = (
        SequenceLayout([[range(p, p + 1) for p in order[shard::4]] for shard in range(4)])
        if kind == "scattered"
        else getattr(SequenceLayout, kind)(60, 4)
    )
    batches = [next(rows) for rows in every_shard(store, layout, packing=best_fit, rows_per_batch=2)]
    assert actual_weights(batches, layout) == pytest.approx(expected(LINES))


@pytest.mark.parametrize("length", [14, 11])
def test_trees_longer_than_a_row_are_split_and_repeat_shared_segments(tmp_path, length):
    lines = [LINES[4], LINES[0]]
    store = stored(tmp_path, lines)
    rows = single_rank_rows(store, length, packing=best_fit)
    actual = {}
    for number in range(rows.rows_per_epoch):
        batch = rows.batch(number)
        for key, weight in actual_weights([batch], SequenceLayout.contiguous(length, 1)).items():
            actual[key] = actual.get(key, 0) + weight
    cut = {key: weight for key, weight in expected(lines).items() if len(key) <= length}
    # A token in several parts of a tree is trained in each, by the number of its sequences there: the sums are equal.
    assert actual == pytest.approx(cut)
    waste = rows.waste()[0]
    assert waste.rows == rows.rows_per_epoch and waste.cut == 1
    longest = max(len(key) for key in expected(lines))
    assert (waste.dropped > 0) == (longest > length)


def test_prompt_that_fills_the_row_is_omitted_and_counted(tmp_path):
    store = stored(tmp_path, [{"prompt": "p" * 20, "completions": ["a", "b"]}, {"text": "kept"}])
    rows = single_rank_rows(store, 20, packing=one_per_row)
    assert rows.rows_per_epoch == 1
    assert rows.waste()[0].dropped == pytest.approx(24 / 29)


def test_packings_that_cut_are_refused(tmp_path):
    store = stored(tmp_path)
    with pytest.raises(ValueError, match=r"trees.* greedy .*best_fit.*one_per_row"):
        single_rank_rows(store, 60, packing=greedy)

    def cutting(lengths, length, key):
        return greedy(lengths, length, key)

    with pytest.raises(ValueError, match="cuts documents"):
        single_rank_rows(store, 40, packing=cutting)


def test_resuming_from_a_state_gives_the_same_batches(tmp_path):
    store = stored(tmp_path)
    settings = {"packing": best_fit, "seed": 3}
    first = single_rank_rows(store, 40, **settings)
    batches = [next(first) for _ in range(7)]
    middle = single_rank_rows(store, 40, **settings)
    for _ in range(3):
        next(middle)
    state = json.loads(json.dumps(middle.state_dict()))
    layout = SequenceLayout.zigzag(40, 2)
    resumed = [rows.load_state_dict(state) for rows in every_shard(store, layout, **settings)]
    for batch in batches[3:]:
        parts = [next(rows) for rows in resumed]
        assert torch.equal(layout.join([part.tokens for part in parts]), batch.tokens)
        assert parts[0].parents == batch.parents and parts[1].documents == batch.documents
        assert actual_weights(parts, layout) == pytest.approx(actual_weights([batch], SequenceLayout.contiguous(40, 1)))


def test_mixtures_with_documents_and_layouts_by_parents(tmp_path):
    (tmp_path / "a").mkdir()
    trees = stored(tmp_path / "a")
    lines = [{"text": "some document"}, {"text": "another one, longer"}]
    documents = stored(tmp_path, lines, format="jsonl")
    calls = []

    def layout_for(documents, parents):
        calls.append((documents, parents))
        return SequenceLayout.contiguous(60, 1)

    rows = single_rank_rows(
        [trees, documents],
        60,
        packing=best_fit,
        weights=[1, 1],
        rows_per_batch=4,
        layout_for=layout_for,
        reset_positions=True,
    )
    batch = next(rows)
    assert calls[0] == (batch.documents, batch.parents)
    actual = actual_weights([batch], SequenceLayout.contiguous(60, 1))
    assert set(actual) == {*expected(LINES)} | {*expected(lines)}


def test_equal_prompts_are_on_one_side_of_the_split(tmp_path):
    lines = [{"prompt": f"prompt {i % 20:02}", "completions": [f"{i}"]} for i in range(60)]
    store = stored(tmp_path, lines)
    sides = [{bytes(side.read(d, 0, 9).tolist()) for d in range(len(side))} for side in store.split(0.3)]
    assert not sides[0] & sides[1] and all(sides)
    one = stored_one(tmp_path / "one")
    with pytest.raises(ValueError, match="one tree"):
        one.split()


def stored_one(folder):
    folder.mkdir()
    return stored(folder, LINES[:1])


def test_stores_of_documents_are_unchanged(tmp_path):
    stored(tmp_path, [{"text": "abc"}], format="jsonl")
    header = json.loads((tmp_path / "store/store.json").read_text())
    assert header["version"] == 1 and "segments" not in header
    assert not (tmp_path / "store/segments.bin").exists()


def test_workers_and_chunks_make_the_same_store(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    full, cut = stored(tmp_path / "a"), stored(tmp_path / "b", chunk_bytes=50)
    assert full.content == cut.content
    assert np.array_equal(full.trees.table, cut.trees.table)


@pytest.mark.parametrize(
    "line, message",
    [
        (
            {"completions": ["a"]},
            "'prompt'.*'text'.*'messages' .*'completions'",
        ),
        ({"prompt": "a"}, "'completions'.*'prompt'"),
        ({"prompt": "a", "completions": []}, "'completions' .*list"),
        ({"text": "a", "completions": ["b"]}, "'completions' .*'text'.*'children'"),
        ({"prompt": "a", "completions": ["b"], "children": ["c"]}, "'children' .*'prompt'.*'completions'"),
        ({"prompt": "a", "completions": "b"}, "'completions' .*list"),
        ({"prompt": "", "completions": ["b"]}, "'prompt' "),
        ({"prompt": "a", "completions": ["b", ""]}, r"'completions\[1\].text' "),
        ({"prompt": 3, "completions": ["b"]}, "'prompt' is int"),
        ({"prompt": "a", "completions": [None]}, r"'completions\[0\]' is null"),
        ({"prompt": "a", "completions": [{"text": "b", "weight": -1}]}, r"'completions\[0\].weight' is -1"),
        ({"prompt": "a", "weight": 1, "completions": ["b"]}, "'weight': completions"),
        ({"text": "a", "train": 1}, "'train' is 1"),
        ({"prompt": [{"content": "a"}], "completions": ["b"]}, "message 0 .*role"),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completions": ["b"]},
            "text .*messages",
        ),
        ({"messages": [{"role": "user", "content": "a"}]}, "chat template"),
        ([1], "list"),
    ],
)
def test_invalid_lines_of_trees_are_refused_by_name(tmp_path, line, message):
    with pytest.raises(ValueError, match=f"trees.jsonl:byte 38: .*{message}"):
        stored(tmp_path, [{"prompt": "a", "completions": ["b"]}, line])
    store = stored(tmp_path, [{"prompt": "a", "completions": ["b"]}, line], invalid="skip", overwrite=True)
    assert len(store) == 1


def test_the_documents_argument_selects_the_reading_of_trees(tmp_path):
    with pytest.raises(ValueError, match=r"'text'.*--format trees"):
        stored(tmp_path, LINES[:1], format="auto")


def test_a_changed_segment_table_is_refused(tmp_path):
    stored(tmp_path)
    file = tmp_path / "store/segments.bin"
    good = np.fromfile(file, dtype=open_store(tmp_path / "store").trees.table.dtype)
    for name, value, message in [("parent", 5, "segment 2 .*segment 5"), ("end", 7, "segment 2 ")]:
        table = good.copy()
        table[name][2] = value
        table.tofile(file)
        with pytest.raises(ValueError, match=message):
            open_store(tmp_path / "store").tree(0)
    good[:-1].tofile(file)
    with pytest.raises(ValueError, match=r"segments.bin .*byte"):
        open_store(tmp_path / "store")


def test_best_fit_rows_of_trees_have_the_tokens_of_a_shard(tmp_path):
    layout = SequenceLayout.zigzag(60, 4)
    rows = PackedSequences(stored(tmp_path), layout=layout, shard=3, rows_per_batch=1, packing=best_fit)
    assert next(rows).tokens.shape == (1, 15)


def test_statistics_count_shared_tokens(tmp_path, capsys):
    store = stored(tmp_path)
    actual = describe(store)
    each = [len(tokens) for line in LINES for tokens, _, _ in sequences(line)]
    assert (actual["sequences"], actual["unshared_tokens"]) == (len(each), sum(each))
    assert actual["stored_percent"] == pytest.approx(100 * store.tokens / sum(each))
    assert describe(store.select(np.array([0, 1, 0, 1, 0], bool)))["sequences"] == 3
    main(["info", str(tmp_path / "store")])
    assert "% of these stored" in capsys.readouterr().out


def test_packings_of_trees_are_measured_by_their_mask(tmp_path):
    lines = [{"prompt": "p" * 200, "completions": ["c" * n for n in range(10, 60, 5)]} for _ in range(3)]
    store = stored(tmp_path, lines)
    row = single_rank_rows(store, 600, packing=best_fit).row(0)
    (slices,) = row.mask.slices(600)
    counts = np.zeros((600, 600), int)
    for q0, q1, k0, k1, _, high in slices.tolist():
        i, j = np.ogrid[:600, :600]
        counts += (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (j - i <= high)
    for at in (0, 199, 200, 215, 400, 599):
        assert np.flatnonzero(counts[at]).tolist() == path_of((row.ends, row.parents), at)
    assert counts.max() == 1
    measured = measure_packings(store, 600, shards=4, rows=2)
    assert [actual.packing for actual in measured] == ["best_fit", "one_per_row"]
    assert all(actual.balanced < 1.05 < actual.zigzag for actual in measured)
