"""Documents: the default corpus, and the user's own text."""

from armillary.data import Document, python_corpus, read_documents


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


# -- the default corpus -----------------------------------------------------------------------------------------------


def test_python_corpus_is_large_sorted_and_has_long_documents():
    corpus = python_corpus()
    actual = [document.name for document in corpus]
    assert sum(len(document.text) for document in corpus) > 1_000_000
    assert actual == sorted(set(actual))
    assert {"argparse.py", "email/message.py", "unittest/case.py", "doctest.py"} <= set(actual)
    manual = [document for document in corpus if document.name.startswith("pydoc_data/topics/")]
    assert max(len(document.text) for document in manual) > 32_000


def test_python_corpus_has_only_the_standard_library():
    parts = {part for document in python_corpus() for part in document.name.split("/")}
    left_out = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "topics.py"}
    assert not parts & left_out
    assert not [part for part in parts if part.startswith(("test_", "_sysconfigdata"))]


def test_python_corpus_is_reproducible():
    assert python_corpus() == python_corpus()


# -- the user's own text ----------------------------------------------------------------------------------------------


def test_a_file_is_one_document(tmp_path):
    write(tmp_path, book=b"It was a dark night.")
    assert read_documents(tmp_path / "book") == [Document("book", b"It was a dark night.")]


def test_a_folder_is_read_at_any_depth_in_the_order_of_names(tmp_path):
    write(tmp_path, b__two=b"2", a=b"1", b__c__three=b"3")
    assert read_documents(str(tmp_path)) == [Document("a", b"1"), Document("b/c/three", b"3"), Document("b/two", b"2")]


def test_invalid_utf8_is_kept(tmp_path):
    write(tmp_path, latin=b"caf\xe9")
    assert read_documents(tmp_path) == [Document("latin", b"caf\xe9")]


def test_hidden_empty_and_binary_files_of_a_folder_are_skipped(tmp_path):
    hidden = {".git__config": b"hidden folder", ".notes": b"hidden file"}
    write(tmp_path, kept=b"text", empty=b"", picture=b"\x89PNG\0\0", **hidden)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert read_documents(tmp_path) == [Document("kept", b"text")]


def test_a_single_file_is_read_even_if_binary(tmp_path):
    write(tmp_path, **{".wide": "wide".encode("utf-16-le")})
    assert read_documents(tmp_path / ".wide") == [Document(".wide", b"w\0i\0d\0e\0")]
