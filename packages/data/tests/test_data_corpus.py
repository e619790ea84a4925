"""Documents: the default corpus, the user's own text, and the split."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.data import Document, python_corpus, read_documents, split_documents
from armillary.data.order import stable_hash

names = st.lists(st.text(max_size=8), min_size=2, max_size=30, unique=True)


def named(names):
    return [Document(name, b"text") for name in names]


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


# -- the default corpus -----------------------------------------------------------------------------------------------


def test_the_python_corpus_is_large_sorted_and_has_long_documents():
    corpus = python_corpus()
    found = [document.name for document in corpus]
    assert sum(len(document.text) for document in corpus) > 1_000_000
    assert found == sorted(set(found))
    assert {"argparse.py", "email/message.py", "unittest/case.py", "doctest.py"} <= set(found)
    manual = [document for document in corpus if document.name.startswith("pydoc_data/topics/")]
    assert max(len(document.text) for document in manual) > 32_000


def test_the_python_corpus_has_only_the_library_as_it_was_written():
    parts = {part for document in python_corpus() for part in document.name.split("/")}
    left_out = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "topics.py"}
    assert not parts & left_out
    assert not [part for part in parts if part.startswith(("test_", "_sysconfigdata"))]


def test_the_python_corpus_is_the_same_every_time():
    assert python_corpus() == python_corpus()


# -- the user's own text ----------------------------------------------------------------------------------------------


def test_a_file_is_one_document(tmp_path):
    write(tmp_path, book=b"It was a dark night.")
    assert read_documents(tmp_path / "book") == [Document("book", b"It was a dark night.")]


def test_a_folder_is_read_at_any_depth_in_the_order_of_names(tmp_path):
    write(tmp_path, b__two=b"2", a=b"1", b__c__three=b"3")
    assert read_documents(str(tmp_path)) == [Document("a", b"1"), Document("b/c/three", b"3"), Document("b/two", b"2")]


def test_bytes_that_are_not_utf8_are_kept_as_they_are(tmp_path):
    write(tmp_path, latin=b"caf\xe9")
    assert read_documents(tmp_path) == [Document("latin", b"caf\xe9")]


def test_hidden_empty_and_binary_files_of_a_folder_are_left_out(tmp_path):
    hidden = {".git__config": b"hidden folder", ".notes": b"hidden file"}
    write(tmp_path, kept=b"text", empty=b"", picture=b"\x89PNG\0\0", **hidden)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert read_documents(tmp_path) == [Document("kept", b"text")]


def test_a_file_named_by_itself_is_read_whatever_it_holds(tmp_path):
    write(tmp_path, **{".wide": "wide".encode("utf-16-le")})
    assert read_documents(tmp_path / ".wide") == [Document(".wide", b"w\0i\0d\0e\0")]


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path))}/nowhere cannot be read \(No such file.*give a"):
        read_documents(tmp_path / "nowhere")


@pytest.mark.parametrize("make", ["empty folder", "empty files", "empty file"])
def test_a_path_without_text_is_named(tmp_path, make):
    if make != "empty folder":
        write(tmp_path, one=b"", deep__two=b"")
    path = tmp_path / "one" if make == "empty file" else tmp_path
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} holds no text; give a text file, or a folder"):
        read_documents(path)


@pytest.mark.parametrize("single", [True, False])
def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch, single):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    write(tmp_path, secret=b"text")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"secret cannot be read \(Permission denied\); give a text file") as failure:
        read_documents(tmp_path / "secret" if single else tmp_path)
    assert "\n" not in str(failure.value)


def test_a_folder_that_may_not_be_read_is_not_passed_over(tmp_path, monkeypatch):
    scan = os.scandir

    def refuse(path):
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    write(tmp_path, open=b"text", locked__secret=b"text")
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"locked cannot be read \(Permission denied\)"):
        read_documents(tmp_path)


# -- the split --------------------------------------------------------------------------------------------------------


def test_a_hash_is_the_same_in_every_process():
    assert stable_hash("armillary") == 13729582951640400556
    assert stable_hash(os.fsdecode(b"caf\xe9")) != stable_hash("caf")


@given(names, st.floats(0.01, 0.99))
def test_each_document_is_on_one_side_and_no_side_is_empty(names, fraction):
    documents = named(names)
    train, validation = split_documents(documents, fraction)
    assert train and validation
    assert sorted(train + validation, key=lambda d: d.name) == sorted(documents, key=lambda d: d.name)


@given(names, st.randoms())
def test_the_split_does_not_depend_on_the_order_of_documents(names, random):
    documents = named(names)
    assert split_documents(random.sample(documents, len(documents))) == split_documents(documents)


def test_the_split_stays_put_when_documents_are_added():
    few, many = named(map(str, range(500))), named(map(str, range(1000)))
    for before, after in zip(split_documents(few), split_documents(many), strict=True):
        assert {document.name for document in before} < {document.name for document in after}


def test_the_split_has_about_the_share_that_was_asked_for():
    _, validation = split_documents(named(map(str, range(4000))), 0.1)
    assert 320 < len(validation) < 480


def test_a_single_document_gives_its_tail():
    train, validation = split_documents([Document("book", bytes(range(100)))])
    assert train == [Document("book", bytes(range(95)))]
    assert validation == [Document("book", bytes(range(95, 100)))]


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_both_parts_of_a_short_document_hold_something(fraction):
    train, validation = split_documents([Document("note", b"ab")], fraction)
    assert (train[0].text, validation[0].text) == (b"a", b"b")


@pytest.mark.parametrize("fraction", [0, 1, -0.5, float("nan")])
def test_a_share_that_leaves_one_side_empty_is_refused(fraction):
    with pytest.raises(ValueError, match=f"validation_fraction={fraction} must lie between 0 and 1"):
        split_documents(named("ab"), fraction)


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match="no documents to split"):
        split_documents([])
    with pytest.raises(ValueError, match="document 'note' has 1 bytes to split; give at least 2"):
        split_documents([Document("note", b"a")])
