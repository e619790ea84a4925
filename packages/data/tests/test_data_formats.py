"""Folders of tokens: reading returns the written tokens, and errors name the damage."""

import json
import math
import re
import shutil

import numpy as np
import pytest
from data_stores import numbered, read_rows, single_rank_rows, write_folder

from armillary.data import ByteTokenizer, Vocabulary, is_store, open_store, verify_folder
from armillary.data.formats import folder as format_of_folders

LENGTHS = [3, 0, 70, 1, 40]
DOCUMENTS = [numbered(LENGTHS).read(i, 0, length).tolist() for i, length in enumerate(LENGTHS)]
HASHES = [7, 2**64 - 1, 0, 5, 9]


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "store", DOCUMENTS, hashes=HASHES)


@pytest.fixture
def small_blocks(monkeypatch):
    """Sets the block size of checksums to 64 bytes, for reading and writing."""
    monkeypatch.setattr(format_of_folders, "BLOCK", 64)
    monkeypatch.setattr("data_stores.BLOCK", 64)


def rewrite(path, at, data):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def edit(folder, **changes):
    """Changes values of the header; None removes one."""
    header = json.loads((folder / "store.json").read_text()) | changes
    header = {name: value for name, value in header.items() if value is not None}
    (folder / "store.json").write_text(json.dumps(header))


def refused(folder, message, read=open_store):
    with pytest.raises(ValueError, match=message) as failure:
        list(read(folder)) if read is verify_folder else read(folder)
    assert type(failure.value) is ValueError
    assert "\n" not in str(failure.value)
    return True


# -- whole folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_reading_a_folder_returns_the_written_tokens(tmp_path, dtype):
    path = write_folder(tmp_path / "store", DOCUMENTS, dtype, hashes=HASHES)
    store = open_store(str(path))
    assert [store.read(i, 0, length).tolist() for i, length in enumerate(LENGTHS)] == DOCUMENTS
    assert store.read(2, 5, 20, 7).dtype == dtype
    assert store.hashes.tolist() == HASHES
    assert store.vocabulary == Vocabulary("numbers", 2**16, 0)
    assert (len(store), store.tokens, store.name) == (5, sum(LENGTHS), str(path))
    assert is_store(path)


def test_rows_of_a_folder_equal_rows_of_documents_in_memory(folder):
    actual = read_rows(single_rank_rows(open_store(folder), 16), 0, 20)
    memory = numbered(LENGTHS)
    memory.vocabulary = Vocabulary(end_of_document=0)
    assert actual == read_rows(single_rank_rows(memory, 16), 0, 20)


def test_content_depends_on_tokens_and_boundaries_not_on_the_path(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    other_tokens = write_folder(tmp_path / "other", [*DOCUMENTS[:4], DOCUMENTS[4][::-1]])
    other_bounds = write_folder(tmp_path / "bounds", [DOCUMENTS[0][:2], DOCUMENTS[0][2:], *DOCUMENTS[2:]])
    actual = [open_store(path).content for path in (folder, tmp_path / "copy", other_tokens, other_bounds)]
    assert actual[0] == actual[1]
    assert len(set(actual)) == 3


def test_a_store_on_disk_cannot_be_changed(folder):
    store = open_store(folder)
    for mapped in (store.arrays[0], store.stops, store.hashes):
        with pytest.raises(ValueError, match="read-only"):
            mapped[0] = 1
    assert sum(verify_folder(folder)) == sum(2 * length + 16 for length in LENGTHS) + 8


def test_a_folder_without_documents_opens_and_cannot_be_packed(tmp_path):
    store = open_store(write_folder(tmp_path / "store", [[]], hashes=[0]))
    assert (len(store), store.tokens) == (1, 0)
    with pytest.raises(ValueError, match=r"store .*no tokens"):
        single_rank_rows(store, 4)


# -- damaged files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [open_store, verify_folder])
@pytest.mark.parametrize("name, size", [("tokens.bin", 228), ("documents.bin", 48), ("hashes.bin", 40)])
def test_files_of_another_length_are_refused_by_the_byte(folder, name, size, read):
    path = folder / name
    full = path.read_bytes()
    assert len(full) == size
    for cut in (size - 1, size // 2, 0):
        path.write_bytes(full[:cut])
        assert refused(folder, rf"{name} .*byte {cut}; .* {size} bytes", read)
    path.write_bytes(full + b"abc")
    assert refused(folder, rf"{name} has {size + 3} bytes; .* {size} bytes", read)
    path.unlink()
    assert refused(folder, rf"{name} .*No such file.* {size} bytes", read)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "hashes.bin"])
def test_a_flipped_bit_is_detected_with_its_block(tmp_path, small_blocks, name):
    folder = write_folder(tmp_path / "store", [list(range(90))] * 10, hashes=range(10))
    full = (folder / name).read_bytes()
    assert sum(verify_folder(folder)) == 1800 + 88 + 80
    for byte in (0, 63, 64, len(full) - 1):
        rewrite(folder / name, byte, bytes([full[byte] ^ 4]))
        first = byte // 64 * 64
        last = min(first + 64, len(full)) - 1
        assert refused(folder, rf"{name}: bytes {first} to {last} do not match their checksum; prepare", verify_folder)
        rewrite(folder / name, byte, full[byte : byte + 1])
    assert len(list(verify_folder(folder))) == 29 + 2 + 2


def test_tokens_outside_of_the_vocabulary_are_named_by_byte(tmp_path, small_blocks):
    documents = [[1, 2, 3] * 20, [4] * 30 + [300, 5]]
    vocabulary = {"tokenizer": "numbers", "size": 300, "end_of_document": 0}
    folder = write_folder(tmp_path / "store", documents, vocabulary=vocabulary)
    assert refused(folder, r"tokens.bin: token 300 at byte 180 is not in the vocabulary of 300", verify_folder)
    edit(folder, vocabulary=vocabulary | {"size": 301})
    assert sum(verify_folder(folder)) == 2 * 92 + 24 + 16


def test_a_decreasing_index_is_refused_by_its_byte(folder):
    rewrite(folder / "documents.bin", 8 * 2, np.int64(2).tobytes())
    assert refused(folder, r"store: document 1 of 5 ends at token 2, before its start 3 \(byte 16 of the index\)")


@pytest.mark.parametrize("at, value, says", [(0, 1, "from 1 to 114"), (5, 113, "from 0 to 113"), (5, -1, "0 to -1")])
def test_an_index_of_other_tokens_is_refused(folder, at, value, says):
    rewrite(folder / "documents.bin", 8 * at, np.int64(value).tobytes())
    assert refused(folder, rf"documents.bin runs .*{says} tokens, not from 0 to 114")


# -- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '"text"',
        "{}",
        '{"format": "armillary token store", "version": 1}',
        "\xff\xfe",
        "NaN",
    ],
)
def test_invalid_headers_are_refused(folder, text):
    (folder / "store.json").write_bytes(text.encode("latin-1"))
    assert refused(folder, r"store\.json ")
    assert refused(folder, r"store.json is not the header of a token store \(", verify_folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16"},
        {"dtype": "uint99"},
        {"dtype": None},
        {"tokens": "114"},
        {"tokens": -1},
        {"tokens": 11.5},
        {"documents": None},
        {"documents": -5},
        {"vocabulary": {"colour": 3}},
        {"vocabulary": None},
        {"checksums": {}},
        {"checksums": {"tokens.bin": [], "documents.bin": [1], "hashes.bin": [1]}},
        {"checksums": {"tokens.bin": [1, 2], "documents.bin": [1], "hashes.bin": [1]}},
        {"colour": "red"},
        {"tokens": True},
        {"vocabulary": {"size": "many"}},
        {"vocabulary": {"size": math.nan}},
        {"vocabulary": {"size": -1}},
        {"vocabulary": {"end_of_document": [1]}},
        {"vocabulary": {"tokenizer": 7}},
        {"summary": 3},
        {"summary": {"skipped": "many"}},
    ],
)
def test_headers_with_foreign_values_are_refused(folder, changes):
    edit(folder, **changes)
    assert refused(folder, r"store\.json ")


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"version": 2}, "'armillary token store' version 2"),
        ({"version": 2, "colour": "red", "checksums": None}, "'armillary token store' version 2"),
        ({"format": "another store"}, "'another store' version 1"),
    ],
)
def test_other_versions_are_refused_by_name(folder, changes, says):
    edit(folder, **changes)
    assert refused(folder, rf"store.json is {says}")


# -- missing paths ----------------------------------------------------------------------------------------------------


def test_paths_without_tokens_are_refused(tmp_path):
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "alone.bin").write_bytes(b"1234")
    for name in ("", "file.txt", "alone.bin", "alone"):
        says = "holds no tokens" if (tmp_path / name).exists() else "does not exist"
        assert refused(tmp_path / name, re.escape(f"{tmp_path / name} {says}"))
        assert not is_store(tmp_path / name)


@pytest.mark.parametrize("path", [".", "/", ".."])
def test_dot_and_root_are_valid_paths(tmp_path, monkeypatch, folder, path):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert refused(path, "holds no tokens")
    assert not is_store(path)
    monkeypatch.chdir(folder)
    assert open_store(".").tokens == sum(LENGTHS)


def test_an_unfinished_store_is_named(tmp_path):
    (tmp_path / "store.partial").mkdir()
    assert refused(tmp_path / "store", rf"{re.escape(str(tmp_path))}/store .*/store\.partial")
    assert is_store(tmp_path / "store")


@pytest.mark.parametrize("name", ["store.json", "tokens.bin", "documents.bin", "hashes.bin"])
def test_unreadable_files_are_named(folder, monkeypatch, name):
    import builtins
    import io

    def refuse(path, *args, **kwargs):
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, *args, **kwargs)

    really = io.open
    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr(builtins, "open", refuse)
    assert refused(folder, rf"store.*{name}.*Permission denied")
    assert refused(folder, rf"store.*{name}.*Permission denied", verify_folder)


def test_another_tokenizer_is_refused(folder):
    with pytest.raises(ValueError, match=r"store .*numbers.*bytes"):
        open_store(folder, ByteTokenizer())
    edit(folder, vocabulary={"tokenizer": "bytes", "size": 257, "end_of_document": 256})
    assert open_store(folder, ByteTokenizer()).tokens == sum(LENGTHS)
    edit(folder, vocabulary={"tokenizer": None, "size": None, "end_of_document": None})
    assert open_store(folder, ByteTokenizer()).tokens == sum(LENGTHS)
