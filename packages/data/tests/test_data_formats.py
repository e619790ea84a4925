"""Folders of tokens: reading returns the written tokens, and errors name the damage."""

import json
import shutil

import pytest
from data_stores import documents_of, numbered, write_folder

from armillary.data import ByteTokenizer, Vocabulary, is_store, open_store, verify_folder
from armillary.data.formats import store_folder as format_of_folders

LENGTHS = [3, 0, 70, 1, 40]
DOCUMENTS = documents_of(numbered(LENGTHS))
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


def check_damage(folder, message):
    with pytest.raises(ValueError, match=message):
        list(verify_folder(folder))


# -- whole folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_reading_a_folder_returns_the_written_tokens(tmp_path, dtype):
    path = write_folder(tmp_path / "store", DOCUMENTS, dtype, hashes=HASHES)
    store = open_store(str(path))
    assert documents_of(store) == DOCUMENTS
    assert store.read(2, 5, 20, 7).dtype == dtype
    assert store.hashes.tolist() == HASHES
    assert store.vocabulary == Vocabulary("numbers", 2**16, 0)
    assert (len(store), store.tokens, store.name) == (5, sum(LENGTHS), str(path))
    assert is_store(path)


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


def test_a_folder_of_empty_documents_opens(tmp_path):
    store = open_store(write_folder(tmp_path / "store", [[]], hashes=[0]))
    assert (len(store), store.tokens) == (1, 0)


# -- damaged files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "hashes.bin"])
def test_a_flipped_bit_is_detected_with_its_block(tmp_path, small_blocks, name):
    folder = write_folder(tmp_path / "store", [list(range(90))] * 10, hashes=range(10))
    full = (folder / name).read_bytes()
    assert sum(verify_folder(folder)) == 1800 + 88 + 80
    for byte in (0, 63, 64, len(full) - 1):
        rewrite(folder / name, byte, bytes([full[byte] ^ 4]))
        first = byte // 64 * 64
        last = min(first + 64, len(full)) - 1
        check_damage(folder, rf"{name}: bytes {first} to {last} do not match their checksum; prepare")
        rewrite(folder / name, byte, full[byte : byte + 1])
    assert len(list(verify_folder(folder))) == 29 + 2 + 2


def test_tokens_outside_of_the_vocabulary_are_named_by_byte(tmp_path, small_blocks):
    documents = [[1, 2, 3] * 20, [4] * 30 + [300, 5]]
    vocabulary = {"tokenizer": "numbers", "size": 300, "end_of_document": 0}
    folder = write_folder(tmp_path / "store", documents, vocabulary=vocabulary)
    check_damage(folder, r"tokens.bin: token 300 at byte 180 is not in the vocabulary of 300")
    edit(folder, vocabulary=vocabulary | {"size": 301})
    assert sum(verify_folder(folder)) == 2 * 92 + 24 + 16


# -- paths ------------------------------------------------------------------------------------------------------------


def test_paths_without_tokens_are_no_stores(tmp_path, monkeypatch, folder):
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "alone.bin").write_bytes(b"1234")
    (tmp_path / "unfinished.partial").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not any(map(is_store, ("file.txt", "alone.bin", "alone", ".", "..", "/")))
    assert is_store("unfinished")  # so that it is chosen, and opening it says how to finish it
    monkeypatch.chdir(folder)
    assert open_store(".").tokens == sum(LENGTHS)


def test_a_store_of_the_same_or_of_an_unknown_tokenizer_opens(folder):
    edit(folder, vocabulary={"tokenizer": "bytes", "size": 257, "end_of_document": 256})
    assert open_store(folder, ByteTokenizer()).tokens == sum(LENGTHS)
    edit(folder, vocabulary={"tokenizer": None, "size": None, "end_of_document": None})
    assert open_store(folder, ByteTokenizer()).tokens == sum(LENGTHS)
