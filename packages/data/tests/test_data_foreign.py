"""Token files of other libraries: folders saved by `datasets`, and indexed datasets of Megatron-LM."""

import shutil

import numpy as np
import pytest
from data_stores import MEGATRON_CODES, documents_of, every_shard, megatron_index, numbered, read_rows, single_rank_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.core import SequenceLayout
from armillary.data import ByteTokenizer, Vocabulary, is_store, one_per_row, open_store
from armillary.data.internal import tokenizer_of

datasets = pytest.importorskip("datasets")

LENGTHS = [3, 0, 70, 1, 0, 40, 8]
ROWS = documents_of(numbered(LENGTHS))


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()


def save(path, rows=ROWS, column="input_ids", kind=None, **options):
    features = datasets.Features({column: datasets.Sequence(datasets.Value(kind))}) if kind else None
    datasets.Dataset.from_dict({column: rows}, features=features).save_to_disk(path, **options)
    return path


@pytest.mark.parametrize("kind", [None, "uint8", "int16", "uint16", "int32", "uint32", "int64"])
def test_each_row_is_a_document_of_any_type(tmp_path, kind):
    store = open_store(save(tmp_path / "saved", kind=kind))
    assert documents_of(store) == ROWS
    assert store.read(0, 0, 1).dtype == (kind or "int32")
    assert store.vocabulary == Vocabulary()
    assert is_store(tmp_path / "saved")


def test_large_lists_are_read(tmp_path):
    features = datasets.Features({"input_ids": datasets.LargeList(datasets.Value("int32"))})
    datasets.Dataset.from_dict({"input_ids": ROWS}, features=features).save_to_disk(tmp_path / "saved")
    assert documents_of(open_store(tmp_path / "saved")) == ROWS


@pytest.mark.parametrize("shards", [1, 3])
def test_several_files_and_chunks_are_one_store(tmp_path, shards):
    lengths = LENGTHS * 400  # a chunk has 1000 rows
    memory = numbered(lengths)
    memory.vocabulary = Vocabulary()
    rows = documents_of(memory)
    store = open_store(save(tmp_path / "saved", rows, num_shards=shards))
    assert len(store.arrays) == 3
    assert documents_of(store) == rows
    assert read_rows(single_rank_rows(store, 99), 0, 40) == read_rows(single_rank_rows(memory, 99), 0, 40)


def test_shuffles_and_selections_of_a_saved_dataset_are_respected(tmp_path):
    full = datasets.Dataset.from_dict({"input_ids": ROWS})
    full.select([5, 2, 0]).save_to_disk(tmp_path / "some")
    shuffled = full.shuffle(seed=3)
    shuffled.save_to_disk(tmp_path / "shuffled")
    full.filter(lambda row: len(row["input_ids"]) > 2).save_to_disk(tmp_path / "long")
    assert documents_of(open_store(tmp_path / "some")) == [ROWS[5], ROWS[2], ROWS[0]]
    assert documents_of(open_store(tmp_path / "shuffled")) == shuffled["input_ids"][:] != ROWS
    assert documents_of(open_store(tmp_path / "long")) == [row for row in ROWS if len(row) > 2]


def test_another_column_may_contain_the_tokens(tmp_path):
    both = datasets.Dataset.from_dict({"text": ["a", "b"], "tokens": [[1, 2], [3]], "input_ids": [[4], [5]]})
    both.save_to_disk(tmp_path / "saved")
    assert documents_of(open_store(tmp_path / "saved", column="tokens")) == [[1, 2], [3]]
    assert documents_of(open_store(tmp_path / "saved")) == [[4], [5]]


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


def test_information_about_a_dataset_is_optional(tmp_path):
    (save(tmp_path / "saved") / "dataset_info.json").write_text("{}")
    assert documents_of(open_store(tmp_path / "saved")) == ROWS


def test_text_has_the_tokenizer_of_bytes(tmp_path):
    (tmp_path / "text").write_text("plain text is read as bytes")
    assert tokenizer_of(tmp_path / "text") == ByteTokenizer()


# -- Megatron-LM ------------------------------------------------------------------------------------------------------

SEQUENCES = [[1, 2, 3], [], [4], [5, 6], [7, 8, 9, 10], []]


def write(prefix, sequences=SEQUENCES, boundaries=None, code=8, **settings):
    """Writes both files; by default each sequence is a document."""
    boundaries = range(len(sequences) + 1) if boundaries is None else boundaries
    tokens = np.array([token for sequence in sequences for token in sequence], MEGATRON_CODES[code])
    tokens.astype(tokens.dtype.newbyteorder("<")).tofile(f"{prefix}.bin")
    with open(f"{prefix}.idx", "wb") as file:
        file.write(megatron_index([len(s) for s in sequences], list(boundaries), code, **settings))
    return prefix


@pytest.mark.parametrize("code, dtype", MEGATRON_CODES.items())
def test_each_sequence_is_a_document_of_any_type(tmp_path, code, dtype):
    store = open_store(write(tmp_path / "data", code=code))
    assert documents_of(store) == SEQUENCES
    assert store.read(0, 0, 2).dtype == dtype
    assert store.vocabulary == Vocabulary()


def test_documents_of_several_sequences_are_joined(tmp_path):
    store = open_store(write(tmp_path / "data", boundaries=[0, 2, 2, 5, 6]))
    assert documents_of(store) == [[1, 2, 3], [], [4, 5, 6, 7, 8, 9, 10], []]


@pytest.mark.parametrize("name", ["data", "data.bin", "data.idx", "v1.2", "v1.2.bin"])
def test_either_file_or_their_prefix_opens_both(tmp_path, name):
    write(tmp_path / ("v1.2" if name.startswith("v1.2") else "data"))
    assert is_store(tmp_path / name)
    assert documents_of(open_store(str(tmp_path / name))) == SEQUENCES


def test_modes_after_the_index_are_ignored(tmp_path):
    path = write(tmp_path / "data")
    with open(f"{path}.idx", "ab") as file:
        file.write(bytes(len(SEQUENCES)))
    assert documents_of(open_store(path)) == SEQUENCES


def test_content_differs_for_other_files(tmp_path):
    one, same = write(tmp_path / "one"), write(tmp_path / "same")
    bounds = write(tmp_path / "bounds", boundaries=[0, 2, 2, 5, 6, 6, 6])
    lengths = write(tmp_path / "lengths", [[1, 2], [3], *SEQUENCES[2:]])
    tokens = write(tmp_path / "tokens", [[7 + token for token in s] for s in SEQUENCES])
    actual = [open_store(path).content for path in (one, same, bounds, lengths, tokens)]
    assert actual[0] == actual[1]
    assert len(set(actual)) == 4


def test_an_empty_dataset_opens(tmp_path):
    for sequences in ([], [[]], [[], []]):
        store = open_store(write(tmp_path / "data", sequences))
        assert (len(store), store.tokens) == (len(sequences), 0)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_damaged_index_never_reads_outside_of_the_file(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("broken")
    full = bytearray(megatron_index([3, 0, 4], [0, 1, 3]))
    for _ in range(data.draw(st.integers(1, 3))):
        full[data.draw(st.integers(0, len(full) - 1))] = data.draw(st.integers(0, 255))
    (folder / "data.bin").write_bytes(bytes(range(14)))
    (folder / "data.idx").write_bytes(full)
    try:
        actual = documents_of(open_store(folder / "data"))
    except ValueError as error:
        assert "data" in str(error)
    else:
        assert sum(map(len, actual)) * np.dtype(MEGATRON_CODES[full[17]]).itemsize == 14
