"""`prepare` stores every document of the input in order, for all kinds of files and numbers of workers."""

import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_stores import documents_of, files_of, write_files, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from armillary.data import TextTokenizer, open_store, verify_folder
from armillary.data.prepare import Preparation, encode, prepare
from armillary.data.prepare.encode import tokenizer_in
from armillary.data.store import stable_hash
from armillary.data.text.tokenizer import train_bpe

TEXTS = ["one", "two two\n\n", "fünf 漢字", "x", "def walk(self):\n    return self.x\n" * 30, "\0zero", "last one"]


def prepare_header(*inputs, output, workers=1, **options):
    """Prepares a store from chunks of few bytes and returns its header."""
    return prepare(Preparation(inputs, output, **{"chunk_bytes": 50} | options), workers)


def tokens_of(path):
    """Returns the tokens of each document in a store, and the token at the end of all documents."""
    documents = documents_of(open_store(path))
    (end,) = {tokens.pop() for tokens in documents}
    return documents, end


def texts_of(path):
    """Returns the documents in a store of bytes, which end with token 256."""
    documents, end = tokens_of(path)
    return [bytes(tokens) if end == 256 else None for tokens in documents]


@pytest.fixture(scope="session")
def definition():
    """The contents of a tokenizer.json."""
    return train_bpe(iter(TEXTS), 300).definition


# -- documents --------------------------------------------------------------------------------------------------------


def test_text_files_of_a_folder_are_stored_byte_for_byte(tmp_path):
    files = {"b.py": b"print(2)\n" * 20, "a.txt": b"caf\xe9 \xff\xfe", "c__d.py": b"3", "e.md": "漢".encode()}
    left_out = {"picture.png": b"\x89PNG\0", "empty.py": b"", ".hidden": b"h", ".git__config": b"g"}
    write_files(tmp_path / "code", **files, **left_out)
    header = prepare_header(tmp_path / "code", output=tmp_path / "store")
    assert texts_of(tmp_path / "store") == [files["a.txt"], files["b.py"], files["c__d.py"], files["e.md"]]
    assert (header.summary["binary"], header.summary["replaced"], header.summary["skipped"]) == (1, 0, 0)


def as_text(folder):
    return [write_files(folder, **{f"{i}.txt": text.encode()}) / f"{i}.txt" for i, text in enumerate(TEXTS)]


def as_jsonl(folder):
    return [write_jsonl(folder / "a.jsonl", TEXTS)]


def as_packed_jsonl(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(write_jsonl(folder / "a.jsonl", TEXTS).read_bytes()))
    return [folder / "a.jsonl.gz"]


def as_parquet(folder):
    pq.write_table(pa.table({"text": TEXTS}), folder / "a.parquet", row_group_size=2)
    return [folder / "a.parquet"]


def as_dataset(folder):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "saved")
    return [folder / "saved"]


def as_a_mixture(folder):
    parquet = as_parquet(folder)[0]
    pq.write_table(pa.table({"text": TEXTS[3:5]}), parquet)
    (folder / "more").mkdir()
    return [*as_text(folder)[:3], parquet, write_jsonl(folder / "more" / "b.ndjson", TEXTS[5:]).parent]


@pytest.mark.parametrize("make", [as_text, as_jsonl, as_packed_jsonl, as_parquet, as_dataset, as_a_mixture])
def test_every_kind_of_file_gives_its_documents_in_order(tmp_path, make):
    (tmp_path / "input").mkdir()
    options = {"format": "text"} if make is as_text else {}  # a file with a zero byte is text only by this option
    header = prepare_header(*make(tmp_path / "input"), output=tmp_path / "store", **options)
    assert texts_of(tmp_path / "store") == [text.encode() for text in TEXTS]
    assert header.documents == len(TEXTS) and header.summary["documents"] == len(TEXTS)


@given(texts=st.lists(st.text(max_size=30) | st.just("long " * 40), min_size=1, max_size=10), size=st.integers(1, 300))
@settings(max_examples=8, deadline=None)
def test_documents_do_not_depend_on_chunk_size(tmp_path_factory, texts, size):
    folder = tmp_path_factory.mktemp("any")
    texts = [text.encode("utf-8", "ignore").decode() for text in [*texts, "at least one"]]
    header = prepare_header(write_jsonl(folder / "a.jsonl", texts), output=folder / "store", chunk_bytes=size)
    assert texts_of(folder / "store") == [text.encode() for text in texts if text]
    assert header.summary["empty"] == texts.count("")


def test_document_of_one_byte_gives_a_store_of_two_tokens(tmp_path):
    header = prepare_header(write_files(tmp_path, a=b"\xff") / "a", output=tmp_path / "store")
    assert (header.documents, header.tokens, texts_of(tmp_path / "store")) == (1, 2, [b"\xff"])
    assert header.summary["replaced"] == 0  # bytes need not be UTF-8


# -- the store --------------------------------------------------------------------------------------------------------


def test_header_index_and_hashes_are_of_the_documents(tmp_path):
    texts = [text.encode() for text in TEXTS]
    header = prepare_header(write_jsonl(tmp_path / "a.jsonl", ["", *TEXTS]), output=tmp_path / "store")
    store = open_store(tmp_path / "store")
    assert store.lengths.tolist() == [len(text) + 1 for text in texts]
    assert store.hashes.tolist() == [stable_hash(text) for text in texts]
    assert (header.documents, header.tokens) == (len(texts), sum(map(len, texts)) + len(texts))
    assert (header.summary["empty"], header.summary["text_bytes"]) == (1, sum(map(len, texts)))
    assert sum(verify_folder(tmp_path / "store")) == sum(header.sizes().values())
    assert {name: (tmp_path / "store" / name).stat().st_size for name in header.sizes()} == header.sizes()
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "store"]


@pytest.mark.parametrize("size, dtype", [(256, "uint8"), (257, "uint16"), (65_537, "uint32")])
def test_tokens_are_stored_in_the_smallest_dtype(tmp_path, size, dtype):
    words = {f"w{number}": number for number in range(size - 1)} | {"<eos>": size - 1}
    (tmp_path / "tokenizer.json").write_text(Tokenizer(WordLevel(words, unk_token="w0")).to_str())
    path = write_files(tmp_path, a=f"w{size - 2}".encode()) / "a"
    header = prepare_header(path, output=tmp_path / "store", tokenizer=str(tmp_path))
    assert tokens_of(tmp_path / "store") == ([[size - 2]], size - 1)
    assert (header.dtype, header.vocabulary.size) == (dtype, size)


@pytest.mark.parametrize("begin", [None, "a"])
def test_tokenizer_file_gives_the_librarys_tokens(tmp_path, definition, begin):
    (tmp_path / "given.json").write_bytes(definition)
    options = {"tokenizer": str(tmp_path / "given.json"), "begin_of_document": begin}
    header = prepare_header(write_jsonl(tmp_path / "a.jsonl", TEXTS), output=tmp_path / "store", **options)
    library = Tokenizer.from_str(definition.decode())
    begins = [library.token_to_id(begin)] if begin else []
    expected = [begins + library.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert tokens_of(tmp_path / "store") == (expected, library.token_to_id("<|endoftext|>"))
    assert (tmp_path / "store" / "tokenizer.json").read_bytes() == definition
    assert header.summary["begin_of_document"] == begin
    assert tokenizer_in(tmp_path / "store").identity == header.vocabulary.tokenizer
    assert sum(verify_folder(tmp_path / "store")) == sum(header.sizes().values())


def test_a_chosen_end_of_document_is_stored(tmp_path, definition):
    (tmp_path / "tokenizer.json").write_bytes(definition)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    lines = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    library = Tokenizer.from_str(definition.decode())
    for end, options in (("b", {}), ("z", {"end_of_document": "z"})):
        header = prepare_header(lines, output=tmp_path / end, tokenizer=str(tmp_path), **options)
        assert tokens_of(tmp_path / end)[1] == library.token_to_id(end) == header.vocabulary.end_of_document
        assert TextTokenizer.read(tmp_path / end).identity == header.vocabulary.tokenizer


def test_bpe_is_trained_on_the_input_and_decodes_its_text(tmp_path):
    header = prepare_header(
        write_jsonl(tmp_path / "a.jsonl", TEXTS), output=tmp_path / "store", tokenizer="bpe", vocab_size=280
    )
    tokenizer = tokenizer_in(tmp_path / "store")
    library = Tokenizer.from_file(str(tmp_path / "store" / "tokenizer.json"))
    documents, end = tokens_of(tmp_path / "store")
    assert [library.decode(tokens, skip_special_tokens=False) for tokens in documents] == TEXTS
    assert end == library.token_to_id("<|endoftext|>")
    assert header.vocabulary.size == library.get_vocab_size() == 280
    assert tokenizer.identity == header.vocabulary.tokenizer
    assert len(documents[4]) < len(TEXTS[4])  # because pairs were merged


def test_a_store_of_bytes_has_the_tokenizer_of_bytes(tmp_path):
    header = prepare_header(write_jsonl(tmp_path / "a.jsonl", TEXTS), output=tmp_path / "store")
    assert tokenizer_in(tmp_path / "store").identity == header.vocabulary.tokenizer == "bytes"
    assert open_store(tmp_path / "store", tokenizer_in(tmp_path / "store")).vocabulary == header.vocabulary


def test_replaced_store_has_the_new_tokenizer(tmp_path, definition):
    (tmp_path / "given.json").write_bytes(definition)
    lines, output = write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "store"
    prepare_header(lines, output=output, tokenizer="bpe", vocab_size=270)
    header = prepare_header(lines, output=output, tokenizer=str(tmp_path / "given.json"), overwrite=True)
    assert header.vocabulary.size > 270 and header.vocabulary.tokenizer == tokenizer_in(output).identity
    assert (output / "tokenizer.json").read_bytes() == definition
    prepare_header(lines, output=output, overwrite=True)
    assert texts_of(output) == [text.encode() for text in TEXTS]
    assert not (output / "tokenizer.json").exists()


def test_two_workers_write_the_same_files_as_one(tmp_path, definition):
    (tmp_path / "given.json").write_bytes(definition)
    write_files(tmp_path / "text", **{f"{i}.txt": b"caf\xe9 %d" % i * (i % 7) for i in range(60)})
    inputs = [tmp_path / "text", write_jsonl(tmp_path / "a.jsonl", TEXTS * 5)]
    for workers in (1, 2):
        options = {"tokenizer": str(tmp_path / "given.json"), "workers": workers, "chunk_bytes": 200}
        prepare_header(*inputs, output=tmp_path / f"by {workers}", **options)
    one, two = files_of(tmp_path / "by 1"), files_of(tmp_path / "by 2")
    names = {"store.json", "tokens.bin", "documents.bin", "hashes.bin", "tokenizer.json", "tokenizer_config.json"}
    assert one.keys() == names and one == two
    assert json.loads(one["store.json"])["summary"]["first_replaced"] == "1.txt"


# -- broken text and records ------------------------------------------------------------------------------------------


def test_invalid_utf8_is_replaced_skipped_or_refused(tmp_path, definition):
    (tmp_path / "given.json").write_bytes(definition)
    source = write_files(tmp_path / "in", a=b"fine", b=b"caf\xe9", c=b"\xff", d="漢".encode())
    options = {"tokenizer": str(tmp_path / "given.json"), "chunk_bytes": 5}
    decode = Tokenizer.from_str(definition.decode()).decode

    replaced = prepare_header(source, output=tmp_path / "replaced", **options).summary
    assert [decode(tokens) for tokens in tokens_of(tmp_path / "replaced")[0]] == ["fine", "caf\ufffd", "\ufffd", "漢"]
    assert (replaced["replaced"], replaced["first_replaced"], replaced["skipped"]) == (2, "b", 0)
    hashes = open_store(tmp_path / "replaced").hashes.tolist()
    assert hashes == [stable_hash(text) for text in (b"fine", b"caf\xe9", b"\xff", "漢".encode())]

    skipped = prepare_header(source, output=tmp_path / "skipped", invalid="skip", **options).summary
    assert [decode(tokens) for tokens in tokens_of(tmp_path / "skipped")[0]] == ["fine", "漢"]
    assert (skipped["documents"], skipped["skipped"], skipped["first_skipped"]) == (2, 2, "b")

    for tokenizer in ("bytes", options.pop("tokenizer")):
        with pytest.raises(ValueError, match=r"^b: .*--invalid skip"):
            prepare_header(source, output=tmp_path / "refused", invalid="refuse", tokenizer=tokenizer, **options)


@pytest.mark.parametrize("invalid", ["refuse", "replace"])
def test_broken_line_is_refused_by_its_byte_and_can_be_fixed(tmp_path, invalid):
    lines = [b'{"text": "first document"}\n', b'{"text": "second"}\n', b'{"text": brok}\n', b'{"text": "last"}\n']
    path = write_files(tmp_path, **{"a.jsonl": b"".join(lines)}) / "a.jsonl"
    options = {"output": tmp_path / "store", "chunk_bytes": 20, "invalid": invalid}
    message = r"^a\.jsonl:line 3: .*--invalid skip"
    with pytest.raises(ValueError, match=message):
        prepare_header(path, **options)
    assert os.listdir(tmp_path) == ["a.jsonl"]
    path.write_bytes(path.read_bytes().replace(b"brok", b'"mended"'))
    prepare_header(path, **options)
    assert texts_of(tmp_path / "store") == [b"first document", b"second", b"mended", b"last"]


def test_broken_lines_and_null_fields_are_skipped_and_counted(tmp_path):
    lines = b'{"text": "a"}\n{"text": null}\n\n{"other": 1}\n[]\n{"text": ""}\n{"text": "b"}\n{"text": "cut'
    path = write_files(tmp_path, **{"a.jsonl": lines}) / "a.jsonl"
    actual = prepare_header(path, output=tmp_path / "store", invalid="skip", chunk_bytes=7).summary
    assert texts_of(tmp_path / "store") == [b"a", b"b"]
    assert (actual["documents"], actual["skipped"], actual["empty"]) == (2, 4, 1)
    assert (actual["first_skipped"], actual["first_empty"]) == ("a.jsonl:line 2", "a.jsonl:line 6")


def test_a_giant_document_is_refused_or_skipped_unless_tokens_are_bytes(tmp_path, definition, monkeypatch):
    monkeypatch.setattr(encode, "MAX_DOCUMENT", 40)
    (tmp_path / "given.json").write_bytes(definition)
    lines = write_jsonl(tmp_path / "a.jsonl", ["one", "x" * 41])
    options = {"tokenizer": str(tmp_path / "given.json"), "output": tmp_path / "store"}
    with pytest.raises(ValueError, match=r"^a\.jsonl:line 2: .*41 bytes.* 40 .*--invalid skip"):
        prepare_header(lines, **options)
    assert prepare_header(lines, **options, invalid="skip").summary["skipped"] == 1
    assert prepare_header(lines, output=tmp_path / "bytes").documents == 2


# -- existing stores --------------------------------------------------------------------------------------------------


def test_a_complete_store_of_the_same_input_is_untouched(tmp_path):
    lines, output = write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "store"
    first = prepare_header(lines, output=output)
    stamps = {file.name: file.stat().st_mtime_ns for file in [output, *output.iterdir()]}
    assert prepare_header(lines, output=output) == first
    assert {file.name: file.stat().st_mtime_ns for file in [output, *output.iterdir()]} == stamps
