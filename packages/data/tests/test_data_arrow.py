"""Folders that Hugging Face `datasets` saved."""

import json
import re
import shutil
import sys

import pytest
from data_stores import every_shard, numbered, read_rows, single_rank_rows

from armillary.core import SequenceLayout
from armillary.data import ByteTokenizer, Vocabulary, is_store, one_per_row, open_store
from armillary.data.parts import tokenizer_of

datasets = pytest.importorskip("datasets")

LENGTHS = [3, 0, 70, 1, 0, 40, 8]
ROWS = [numbered(LENGTHS).read(i, 0, length).tolist() for i, length in enumerate(LENGTHS)]


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()


def save(path, rows=ROWS, column="input_ids", kind=None, **options):
    features = datasets.Features({column: datasets.Sequence(datasets.Value(kind))}) if kind else None
    datasets.Dataset.from_dict({column: rows}, features=features).save_to_disk(path, **options)
    return path


def documents(store):
    return [store.read(i, 0, int(size)).tolist() for i, size in enumerate(store.lengths)]


def refused(path, message, **options):
    with pytest.raises(ValueError, match=message) as failure:
        open_store(path, **options)
    assert str(path) in str(failure.value)
    return True


@pytest.mark.parametrize("kind", [None, "uint8", "int16", "uint16", "int32", "uint32", "int64"])
def test_each_row_is_a_document_of_any_type(tmp_path, kind):
    store = open_store(save(tmp_path / "saved", kind=kind))
    assert documents(store) == ROWS
    assert store.read(0, 0, 1).dtype == (kind or "int32")
    assert store.vocabulary == Vocabulary()
    assert is_store(tmp_path / "saved")


def test_large_lists_are_read(tmp_path):
    features = datasets.Features({"input_ids": datasets.LargeList(datasets.Value("int32"))})
    datasets.Dataset.from_dict({"input_ids": ROWS}, features=features).save_to_disk(tmp_path / "saved")
    assert documents(open_store(tmp_path / "saved")) == ROWS


@pytest.mark.parametrize("shards", [1, 3])
def test_several_files_and_chunks_are_one_store(tmp_path, shards):
    lengths = LENGTHS * 400  # a chunk has 1000 rows
    memory = numbered(lengths)
    memory.vocabulary = Vocabulary()
    rows = [memory.read(i, 0, length).tolist() for i, length in enumerate(lengths)]
    store = open_store(save(tmp_path / "saved", rows, num_shards=shards))
    assert len(store.arrays) == 3
    assert documents(store) == rows
    assert read_rows(single_rank_rows(store, 99), 0, 40) == read_rows(single_rank_rows(memory, 99), 0, 40)


def test_shuffles_and_selections_of_a_saved_dataset_are_respected(tmp_path):
    full = datasets.Dataset.from_dict({"input_ids": ROWS})
    full.select([5, 2, 0]).save_to_disk(tmp_path / "some")
    shuffled = full.shuffle(seed=3)
    shuffled.save_to_disk(tmp_path / "shuffled")
    full.filter(lambda row: len(row["input_ids"]) > 2).save_to_disk(tmp_path / "long")
    assert documents(open_store(tmp_path / "some")) == [ROWS[5], ROWS[2], ROWS[0]]
    assert documents(open_store(tmp_path / "shuffled")) == shuffled["input_ids"][:] != ROWS
    assert documents(open_store(tmp_path / "long")) == [row for row in ROWS if len(row) > 2]


def test_another_column_may_contain_the_tokens(tmp_path):
    both = datasets.Dataset.from_dict({"text": ["a", "b"], "tokens": [[1, 2], [3]], "input_ids": [[4], [5]]})
    both.save_to_disk(tmp_path / "saved")
    assert documents(open_store(tmp_path / "saved", column="tokens")) == [[1, 2], [3]]
    assert documents(open_store(tmp_path / "saved")) == [[4], [5]]


def test_a_column_of_labels_replaces_the_next_tokens(tmp_path):
    tokens = [[1, 2, 3, 4], [], [5, 6, 7], [8]]
    labels = [[-100, -100, 3, 4], [], [-100, 6, -100], [-100]]
    datasets.Dataset.from_dict({"input_ids": tokens, "labels": labels}).save_to_disk(tmp_path / "saved")
    store = open_store(tmp_path / "saved")
    expected = {(1, 2, 3, 4): [-100, 3, 4, -100], (5, 6, 7): [6, -100, -100], (8,): [-100]}
    layout = SequenceLayout.striped(4, 2)
    for number in range(3):
        batch = single_rank_rows(store, 4, packing=one_per_row).batch(number)
        row = tuple(batch.tokens[0].tolist()[: batch.documents[0][1]])
        assert batch.labels[0].tolist() == expected[row] + [-100] * (4 - len(row))
        shards = [rows.batch(number) for rows in every_shard(store, layout, packing=one_per_row)]
        assert layout.join([shard.labels for shard in shards]).equal(batch.labels)
    assert store.select(store.lengths == 3).read_labels(0, 1, 3).tolist() == [6, -100]
    with pytest.raises(ValueError, match=r"token 1 of document 2 .* is 6, outside of the vocabulary of 5"):
        store.with_vocabulary(5).read_labels(2, 1, 3)
    with_scalars = datasets.Dataset.from_dict({"input_ids": tokens, "labels": [0, 1, 0, 1]})
    with_scalars.save_to_disk(tmp_path / "classes")  # the class of a row is not the label of a token
    assert open_store(tmp_path / "classes").labels is None
    datasets.Dataset.from_dict({"input_ids": tokens, "labels": [[1], [], [2], [3]]}).save_to_disk(tmp_path / "short")
    assert refused(tmp_path / "short", "'labels' .*'input_ids'")


def test_content_depends_on_rows_not_on_their_path(tmp_path):
    save(tmp_path / "one"), save(tmp_path / "other", ROWS[:-1])
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    one, copy, other = (open_store(tmp_path / name).content for name in ("one", "copy", "other"))
    assert one == copy != other


def test_splitting_needs_no_hashes(tmp_path):
    store = open_store(save(tmp_path / "saved", [[i] for i in range(200)]))
    train, validation = store.split(0.2)
    assert sorted(documents(train) + documents(validation)) == [[i] for i in range(200)]
    assert 15 < len(validation) < 65


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_wrong_column_is_refused_with_the_existing_ones(tmp_path):
    table = {"text": ["a", "b"], "ids": [[1], [2]], "scores": [[1.0], [2.0]], "label": [1, 2], "nested": [[[1]], [[2]]]}
    datasets.Dataset.from_dict(table).save_to_disk(tmp_path / "saved")
    path = tmp_path / "saved"
    assert refused(path, "has no column 'input_ids'; its columns are text, ids, scores, label, nested")
    for column in ("text", "scores", "label", "nested"):
        assert refused(path, f"column '{column}' is .*; give one with lists of integers", column=column)


@pytest.mark.parametrize("rows", [[[1], None, [2]], [[1, None, 2], [3]]])
def test_missing_values_are_refused(tmp_path, rows):
    assert refused(save(tmp_path / "saved", rows), "column 'input_ids' has missing values; drop those rows first")


@pytest.mark.parametrize("kind", ["int32", None])
def test_datasets_without_rows_are_refused(tmp_path, kind):
    assert refused(save(tmp_path / "saved", [], kind=kind), r"cannot be read as a saved dataset \(.*; save it again")


def test_several_splits_are_refused_with_the_path_of_each(tmp_path):
    part, path = datasets.Dataset.from_dict({"input_ids": ROWS}), tmp_path / "saved"
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(path)
    assert refused(path, re.escape(f"holds several splits; give one: {path}/train, {path}/test"))
    assert documents(open_store(path / "train")) == ROWS


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
@pytest.mark.parametrize("text", ["", "{}", "[]", "{", None])
def test_broken_folders_are_refused(tmp_path, name, text):
    path = save(tmp_path / "saved")
    (path / name).unlink() if text is None else (path / name).write_text(text)
    if name == "dataset_info.json" and text == "{}":
        assert documents(open_store(path)) == ROWS
    else:
        assert refused(path, "cannot be read as a saved dataset|holds no tokens")


def test_truncated_or_missing_files_are_refused(tmp_path):
    path = save(tmp_path / "saved", [list(range(5000))] * 8, num_shards=2)
    name = json.loads((path / "state.json").read_text())["_data_files"][1]["filename"]
    full = (path / name).read_bytes()
    for cut in (0, 10, len(full) // 2, len(full) - 100):
        (path / name).write_bytes(full[:cut])
        assert refused(path, "cannot be read as a saved dataset")
    (path / name).unlink()
    assert refused(path, "cannot be read as a saved dataset")


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    path = save(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"datasets .*'armillary-data\[datasets"):
        open_store(path)
    assert is_store(path)


def test_the_tokenizer_of_a_saved_dataset_is_unknown(tmp_path):
    for path, reason in {save(tmp_path / "saved"): "have its tokenizer", tmp_path / "none": "exist"}.items():
        with pytest.raises(ValueError, match=f"{path} does not {reason}"):
            tokenizer_of(path)
    (tmp_path / "text").write_text("plain text is read as bytes")
    assert tokenizer_of(tmp_path / "text") == ByteTokenizer()
