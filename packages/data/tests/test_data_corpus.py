"""Documents: the default corpus, and the user's own text."""

from data_stores import write_files

from armillary.data import Document, python_corpus, read_documents

# -- the default corpus -----------------------------------------------------------------------------------------------


def test_python_corpus_is_large_sorted_reproducible_and_only_the_standard_library():
    corpus = python_corpus()
    actual = [document.name for document in corpus]
    assert sum(len(document.text) for document in corpus) > 1_000_000
    assert actual == sorted(set(actual))
    assert {"argparse.py", "email/message.py", "unittest/case.py", "doctest.py"} <= set(actual)
    manual = [document for document in corpus if document.name.startswith("pydoc_data/topics/")]
    assert max(len(document.text) for document in manual) > 32_000
    parts = {part for name in actual for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "topics.py"}
    assert not [part for part in parts if part.startswith(("test_", "_sysconfigdata"))]
    assert python_corpus() == corpus


# -- the user's own text ----------------------------------------------------------------------------------------------


def test_text_files_at_any_depth_are_read_in_the_order_of_names_without_hidden_empty_and_binary_ones(tmp_path):
    hidden = {".git__config": b"hidden folder", ".notes": b"hidden file"}
    write_files(tmp_path, b__two=b"2", a=b"caf\xe9", b__c__three=b"3", empty=b"", picture=b"\x89PNG\0\0", **hidden)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    kept = [Document("a", b"caf\xe9"), Document("b/c/three", b"3"), Document("b/two", b"2")]
    assert read_documents(tmp_path) == read_documents(str(tmp_path)) == kept


def test_a_single_file_is_read_even_if_binary(tmp_path):
    write_files(tmp_path, **{".wide": "wide".encode("utf-16-le")})
    assert read_documents(tmp_path / ".wide") == [Document(".wide", b"w\0i\0d\0e\0")]
