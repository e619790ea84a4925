"""Documents from files: every record is in one chunk, in an order that depends only on the input."""

import gzip
import json
import os
import re

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_stores import write_files, write_jsonl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from armillary.data import Document, read_documents
from armillary.data.prepare.sources import Invalid, chunks, documents, fingerprint

TEXTS = ["one", "two two", "", "vier\nlines\n", "f\u00fcnf", "six " * 30]


def parquet(path, texts=TEXTS, rows=2, **columns):
    table = pa.table({"id": range(len(texts)), "text": texts, **columns})
    pq.write_table(table, path, row_group_size=rows)
    return path


def read(*inputs, **options):
    return [document for chunk in chunks(inputs, **options) for document in documents(chunk)]


def texts_of(documents):
    return [document.text.decode() for document in documents]


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_chunks_of_any_size_give_the_documents_of_read_documents(tmp_path, size):
    write_files(
        tmp_path, b__two=b"22" * 20, a=b"1", b__c__three=b"3", empty=b"", caf=b"caf\xe9", z=b"4", **{".git__x": b"5"}
    )
    assert read(tmp_path, size=size) == read_documents(tmp_path)


def test_consecutive_files_share_a_chunk_and_a_large_file_has_its_own(tmp_path):
    write_files(tmp_path, a=b"1" * 4, b=b"2" * 4, c=b"3" * 30, d=b"4" * 4)
    actual = chunks([tmp_path], size=10)
    assert [[file.name for file in chunk.files] for chunk in actual] == [["a", "b"], ["c"], ["d"]]
    assert [chunk.bytes for chunk in actual] == [8, 30, 4]
    assert (actual[1].name, actual[1].path) == ("c", tmp_path / "c")


def test_binary_files_of_folders_are_reported(tmp_path):
    noise = bytes(128 + i % 64 for i in range(100))
    write_files(
        tmp_path,
        kept=b"text",
        latin="naïve café, déjà vu: ça va?".encode("latin-1") * 4,
        noise=noise,
        picture=b"PNG\0\0",
    )
    documents = read(tmp_path)
    assert [document.name for document in documents] == ["kept", "latin", "noise", "picture"]
    assert documents[2:] == [
        Invalid("noise", "taken as binary, since 100 of its first 100 characters are not UTF-8", binary=True),
        Invalid("picture", "taken as binary, since it has a zero byte, the first at byte 3", binary=True),
    ]
    assert read(tmp_path / "picture", format="text") == [Document("picture", b"PNG\0\0")]
    assert len(read(tmp_path / "latin")) == 1


def test_inputs_keep_their_order_and_kinds_are_sorted_by_name(tmp_path):
    write_files(tmp_path, x__a=b"1", x__c=b"3", y=b"0")
    write_jsonl(tmp_path / "x" / "b.ndjson", ["2"])
    parquet(tmp_path / "x" / "d.parquet", ["4"])
    actual = read(tmp_path / "y", tmp_path / "x")
    assert [document.name for document in actual] == ["y", "a", "b.ndjson:byte 0", "c", "d.parquet:row 0"]


def test_a_chosen_format_applies_to_every_file(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["1"])
    assert read(tmp_path, format="text") == [Document("a.jsonl", b'{"text": "1"}\n')]
    assert texts_of(read(write_jsonl(tmp_path / "b", ["2"]), format="jsonl")) == ["2"]
    assert texts_of(read(parquet(tmp_path / "c", ["3"]), format="parquet")) == ["3"]


# -- JSONL ------------------------------------------------------------------------------------------------------------


lines = st.sampled_from(
    ['{"text": "a"}', '{"text": "%s"}' % ("long " * 20), "", "  ", '{"text": "é漢"}', "[1]", '"\u2028']
)
ends = st.sampled_from(["\n", "\r\n"])


@given(lines=st.lists(st.tuples(lines, ends), min_size=1, max_size=12), last=lines, size=st.integers(1, 200))
@example(lines=[('{"text": "a"}', "\n")] * 3, last="", size=14)
@settings(max_examples=80, deadline=None)
def test_jsonl_chunks_read_every_line_once(tmp_path_factory, lines, last, size):
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(("".join(line + end for line, end in lines) + last + " ").encode())
    full = read(path, size=1 << 20)
    assert read(path, size=size) == full
    records = [line for line in [*(line for line, _ in lines), last] if line.strip()]
    expected = [json.loads(line)["text"] if "text" in line else None for line in records]
    assert [d.text.decode() if isinstance(d, Document) else None for d in full] == expected


@pytest.mark.parametrize("size", [7, 1 << 20])
def test_records_are_named_by_their_first_byte_and_a_byte_order_mark_is_ignored(tmp_path, size):
    write_files(tmp_path, **{"x.ndjson": b'\xef\xbb\xbf{"text": "a"}\r\n\n{"text": "b"}'})
    assert read(tmp_path, size=size) == [Document("x.ndjson:byte 0", b"a"), Document("x.ndjson:byte 19", b"b")]


@pytest.mark.parametrize("write", [json.dumps, lambda rows: json.dumps(rows, indent=1), None])
def test_records_of_a_json_file_are_documents(tmp_path, write):
    rows = [{"id": index, "text": text} for index, text in enumerate(TEXTS)]
    text = "\n".join(map(json.dumps, rows)) if write is None else write(rows)
    write_files(tmp_path, **{"b.json": text.encode(), "a.json": b'{"text":\n"one object is text"}'})
    settings, *documents = read(tmp_path, size=1 if write else 40)
    assert settings.text.startswith(b'{"text":')
    assert texts_of(documents) == TEXTS
    assert not write or documents[1].name == "b.json:record 1"


def test_packed_jsonl_is_one_piece(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(write_jsonl(tmp_path / "plain.jsonl", TEXTS).read_bytes()))
    assert len(chunks([path], size=1)) == 1
    assert texts_of(read(path)) == TEXTS
    assert read(path)[1].name == "a.jsonl.gz:byte 16"


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"text": "a', "Invalid control character"),
        (b'{"other": "a", "b": 1}', "'text'.*'other', 'b'"),
        (b"{}", "'text'"),
        (b'{"text": null}', "'text'.*null"),
        (b'{"text": 3}', "'text'.*int"),
        (b"[1]", "object.*list"),
        (b'{"text": "\\ud800"}', "surrogates not allowed"),
        (b'{"text": "caf\xe9"}', "can't decode byte 0xe9"),
        (b'{"text": "\xed\xa0\x80"}', "can't decode byte 0xed"),
        (b"[" * 100_000, "nested"),
    ],
)
def test_a_broken_record_is_reported_and_the_next_one_is_read(tmp_path, line, reason):
    write_files(tmp_path, **{"a.jsonl": line + b'\n{"text": "next"}\n'})
    broken, following = read(tmp_path)
    assert isinstance(broken, Invalid) and broken.name == "a.jsonl:byte 0"
    assert re.search(reason, broken.reason)
    assert following == Document(f"a.jsonl:byte {len(line) + 1}", b"next")


# -- Parquet and saved datasets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, count", [(1, 3), (1 << 20, 1)])
def test_parquet_is_cut_by_row_groups(tmp_path, size, count):
    path = parquet(tmp_path / "a.parquet")
    assert len(chunks([path], size=size)) == count
    actual = read(path, size=size)
    assert texts_of(actual) == TEXTS
    assert [document.name for document in actual] == [f"a.parquet:row {row}" for row in range(6)]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_string_columns_of_all_types_are_read_and_null_is_reported(tmp_path, kind):
    path = parquet(tmp_path / "a.parquet", pa.array(["a", None, "b"], pa.string()).cast(kind))
    assert read(path) == [Document("a.parquet:row 0", b"a"), Invalid("a.parquet:row 1", "the text is null"),
                          Document("a.parquet:row 2", b"b")]  # fmt: skip


@pytest.mark.parametrize("size", [1, 40, 1 << 20])
def test_a_saved_dataset_is_cut_by_rows(tmp_path, size):
    rows = datasets.Dataset.from_dict({"text": [*TEXTS, None], "id": range(7)}).with_format("numpy")
    rows.save_to_disk(tmp_path / "saved")
    actual = read(tmp_path / "saved", size=size)
    assert texts_of(actual[:-1]) == TEXTS
    assert [document.name for document in actual] == [f"saved:row {row}" for row in range(7)]
    assert actual[-1] == Invalid("saved:row 6", "the text is null")
    cut = chunks([tmp_path / "saved"], size=size)
    assert (cut[0].start, cut[-1].stop) == (0, 7)
    assert (len(cut) == 1) == (size == 1 << 20)


def test_many_rows_are_read_in_order(tmp_path):
    texts = [str(number) for number in range(1000)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved", num_shards=3)
    assert texts_of(read(tmp_path / "saved", size=1000)) == texts
    assert texts_of(read(parquet(tmp_path / "a.parquet", texts, rows=130), size=1000)) == texts


# -- the fingerprint --------------------------------------------------------------------------------------------------


def test_fingerprint_changes_only_with_input_or_pieces(tmp_path):
    write_files(tmp_path, a=b"text", b=b"more")
    write_jsonl(tmp_path / "c.jsonl", TEXTS)
    os.utime(tmp_path / "a", ns=(0, 0))
    first = fingerprint(chunks([tmp_path]))
    assert re.fullmatch("[0-9a-f]{64}", first) and first == fingerprint(chunks([tmp_path]))
    changed = [fingerprint(chunks([tmp_path], **o)) for o in ({"size": 50}, {"text_field": "x"}, {"format": "text"})]
    os.utime(tmp_path / "a", ns=(0, 1))
    changed.append(fingerprint(chunks([tmp_path])))
    (tmp_path / "b").rename(tmp_path / "bb")
    changed.append(fingerprint(chunks([tmp_path])))
    assert len({first, *changed}) == 6


def test_fingerprint_of_a_saved_dataset_depends_on_its_files(tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    cut = chunks([tmp_path / "saved"])
    first = fingerprint(cut)
    os.utime(next((tmp_path / "saved").glob("*.arrow")), ns=(0, 0))
    assert fingerprint(cut) != first


def test_a_file_removed_or_broken_later_is_named(tmp_path):
    packed = gzip.compress(b'{"text": "a"}\n' * 1000)
    write_files(tmp_path, a=b"text", **{"b.jsonl.gz": packed[: len(packed) // 2]})
    text, broken = chunks([tmp_path])
    (tmp_path / "a").unlink()
    with pytest.raises(ValueError, match=r"a .*No such file"):
        list(documents(text))
    with pytest.raises(ValueError, match=r"a .*No such file"):
        fingerprint([text])
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz "):
        list(documents(broken))
