"""Folders that Hugging Face `datasets` saved."""

import shutil

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
    with_scalars = datasets.Dataset.from_dict({"input_ids": tokens, "labels": [0, 1, 0, 1]})
    with_scalars.save_to_disk(tmp_path / "classes")  # the class of a row is not the label of a token
    assert open_store(tmp_path / "classes").labels is None


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


def test_information_about_a_dataset_is_optional(tmp_path):
    (save(tmp_path / "saved") / "dataset_info.json").write_text("{}")
    assert documents(open_store(tmp_path / "saved")) == ROWS


def test_text_has_the_tokenizer_of_bytes(tmp_path):
    (tmp_path / "text").write_text("plain text is read as bytes")
    assert tokenizer_of(tmp_path / "text") == ByteTokenizer()
