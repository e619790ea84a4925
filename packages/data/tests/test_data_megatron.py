"""Megatron-LM's indexed datasets, written by hand from their published layout."""

import struct
from itertools import accumulate

import numpy as np
import pytest
from data_stores import numbered, read_rows, single_rank_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data import ByteTokenizer, Vocabulary, is_store, open_store

CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
SEQUENCES = [[1, 2, 3], [], [4], [5, 6], [7, 8, 9, 10], []]


def index(lengths, boundaries, code=8, pointers=None, magic=b"MMIDIDX\x00\x00", version=1):
    """Returns the bytes of an index: magic, version, dtype, counts, then lengths, pointers and documents."""
    size = np.dtype(CODES.get(code, "int64")).itemsize
    pointers = [size * end for end in accumulate(lengths, initial=0)][:-1] if pointers is None else pointers
    head = magic + struct.pack("<QBQQ", version, code, len(lengths), len(boundaries))
    parts = [struct.pack(f"<{len(values)}{kind}", *values) for values, kind in ((lengths, "i"), (pointers, "q"))]
    return head + b"".join(parts) + struct.pack(f"<{len(boundaries)}q", *boundaries)


def write(prefix, sequences=SEQUENCES, boundaries=None, code=8, **settings):
    """Writes both files; by default each sequence is a document."""
    boundaries = range(len(sequences) + 1) if boundaries is None else boundaries
    tokens = np.array([token for sequence in sequences for token in sequence], CODES[code])
    tokens.astype(tokens.dtype.newbyteorder("<")).tofile(f"{prefix}.bin")
    with open(f"{prefix}.idx", "wb") as file:
        file.write(index([len(s) for s in sequences], list(boundaries), code, **settings))
    return prefix


def documents(store):
    return [store.read(i, 0, int(size)).tolist() for i, size in enumerate(store.lengths)]


@pytest.mark.parametrize("code, dtype", CODES.items())
def test_each_sequence_is_a_document_of_any_type(tmp_path, code, dtype):
    store = open_store(write(tmp_path / "data", code=code))
    assert documents(store) == SEQUENCES
    assert store.read(0, 0, 2).dtype == dtype
    assert store.vocabulary == Vocabulary()


def test_documents_of_several_sequences_are_joined(tmp_path):
    store = open_store(write(tmp_path / "data", boundaries=[0, 2, 2, 5, 6]))
    assert documents(store) == [[1, 2, 3], [], [4, 5, 6, 7, 8, 9, 10], []]


@pytest.mark.parametrize("name", ["data", "data.bin", "data.idx", "v1.2", "v1.2.bin"])
def test_either_file_or_their_prefix_opens_both(tmp_path, name):
    write(tmp_path / ("v1.2" if name.startswith("v1.2") else "data"))
    assert is_store(tmp_path / name)
    assert documents(open_store(str(tmp_path / name))) == SEQUENCES


def test_rows_have_the_documents_segments(tmp_path):
    lengths = [30, 0, 5, 100]
    memory = numbered(lengths)
    sequences = [memory.read(i, 0, length).tolist() for i, length in enumerate(lengths)]
    store = open_store(write(tmp_path / "data", sequences), ByteTokenizer())
    memory.vocabulary = Vocabulary()
    assert read_rows(single_rank_rows(store, 12), 0, 30) == read_rows(single_rank_rows(memory, 12), 0, 30)


def test_modes_after_the_index_are_ignored(tmp_path):
    path = write(tmp_path / "data")
    with open(f"{path}.idx", "ab") as file:
        file.write(bytes(len(SEQUENCES)))
    assert documents(open_store(path)) == SEQUENCES


def test_other_tokens_of_the_same_lengths_are_other_content(tmp_path):
    one, other = write(tmp_path / "one"), write(tmp_path / "other", [[7 + token for token in s] for s in SEQUENCES])
    assert open_store(one).content != open_store(other).content


def test_content_differs_for_other_files(tmp_path):
    one, same = write(tmp_path / "one"), write(tmp_path / "same")
    bounds = write(tmp_path / "bounds", boundaries=[0, 2, 2, 5, 6, 6, 6])
    lengths = write(tmp_path / "lengths", [[1, 2], [3], *SEQUENCES[2:]])
    actual = [open_store(path).content for path in (one, same, bounds, lengths)]
    assert actual[0] == actual[1]
    assert len(set(actual)) == 3


def test_an_empty_dataset_opens(tmp_path):
    for sequences in ([], [[]], [[], []]):
        store = open_store(write(tmp_path / "data", sequences))
        assert (len(store), store.tokens) == (len(sequences), 0)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_damaged_index_never_reads_outside_of_the_file(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("broken")
    full = bytearray(index([3, 0, 4], [0, 1, 3]))
    for _ in range(data.draw(st.integers(1, 3))):
        full[data.draw(st.integers(0, len(full) - 1))] = data.draw(st.integers(0, 255))
    (folder / "data.bin").write_bytes(bytes(range(14)))
    (folder / "data.idx").write_bytes(full)
    try:
        actual = documents(open_store(folder / "data"))
    except ValueError as error:
        assert "data" in str(error)
    else:
        assert sum(map(len, actual)) * np.dtype(CODES[full[17]]).itemsize == 14
