"""The command line: output, files, exit codes and figures."""

import errno
import json
import os
import re
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.core import SequenceLayout, attention_balance, attention_traffic
from armillary.data import ByteTokenizer, Document, TokenStore, best_fit, open_store
from armillary.data.cli import main
from armillary.data.inspection import LAYOUTS, Bin, describe, histogram, measure_layouts
from armillary.data.internal import packed_rows

LENGTHS = [1, 2, 3, 7, 8, 100, 1, 40, 64, 30]


def store_of(lengths):
    return TokenStore.of([Document(str(i), b"x" * length) for i, length in enumerate(lengths)], ByteTokenizer())


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in LENGTHS))
    return path


@pytest.fixture
def store(lines, tmp_path, capsys):
    """A store made by the command line, whose output is discarded."""
    main(["prepare", str(lines), "-o", str(tmp_path / "store"), "--workers", "1"])
    capsys.readouterr()
    return tmp_path / "store"


def refused(capsys, *arguments):
    """Returns the exit code and the one line of error of a command."""
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    (line,) = err.splitlines() if not out else [out]
    return stop.value.code, line


def columns_of(text):
    """The cells of the table at the end of a text, without its ruled line."""
    head, _, *rows = text.rpartition("\n\n")[2].splitlines()
    return [re.split("  +", line.strip()) for line in (head, *rows)]


def test_values_of_a_header_are_printed_without_control_characters(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some words\n")
    main(["prepare", str(tmp_path / "text.txt"), "--output", str(tmp_path / "store"), "--workers", "1"])
    header = json.loads((tmp_path / "store/store.json").read_text())
    header["summary"] |= {"skipped": 1, "first_skipped": "\x1b]0;title\x07"}
    header["vocabulary"]["tokenizer"] = "\x1b[31m\ntokens 7"
    (tmp_path / "store/store.json").write_text(json.dumps(header))
    capsys.readouterr()
    main(["info", str(tmp_path / "store")])
    out = capsys.readouterr().out
    assert not {"\x1b", "\x07"} & set(out) and r"\x1b[31m tokens 7" in out and r"\x1b]0;title\x07" in out


# -- prepare ----------------------------------------------------------------------------------------------------------


def test_prepare_prints_counts_of_stored_and_omitted_documents(tmp_path, capsys):
    lines = b'{"text": "caf\xc3\xa9"}\n{"text": ""}\n{"text": brok}\n{"text": "b"}\n'
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(lines)
    (tmp_path / "in" / "picture").write_bytes(b"\0")
    (tmp_path / "in" / "utf-16.txt").write_bytes("text".encode("utf-16"))
    (tmp_path / "in" / "nothing.txt").touch()
    (tmp_path / "in" / ".git").mkdir()
    main(["prepare", str(tmp_path / "in"), "--output", str(tmp_path / "store"), "--invalid", "skip", "--workers", "1"])
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "2 files and folders were not read; the first is .git, since it is hidden",
        "1 documents without text were left out; the first is a.jsonl:line 2",
        "2 binary files were left out; the first is picture: taken as binary, since it has a zero byte, the first at "
        "byte 0",
        "1 documents were skipped as broken; the first is a.jsonl:line 3",
        f"{tmp_path / 'store'}: 2 documents, 8 tokens of uint16",
    ]
    assert err.splitlines()[-1] == f"encoding: 100% of {len(lines) + 11} bytes 8 tokens"
    assert "\x1b" not in out + err


def test_prepare_accepts_every_setting(tmp_path, capsys):
    (tmp_path / "a.data").write_text(json.dumps({"body": "abc abc abc"}) + "\n")
    source, output = str(tmp_path / "a.data"), str(tmp_path / "store")
    flags = ["--begin-of-document", "<|endoftext|>", "--end-of-document", "<|endoftext|>", "--vocab-size", "260"]
    main(["prepare", source, "-o", output, "--format", "jsonl", "--text-field", "body", "--tokenizer", "bpe", *flags])
    actual = open_store(output)
    tokens = actual.read(0, 0, actual.tokens).tolist()
    assert tokens[0] == tokens[-1] == actual.vocabulary.end_of_document
    assert actual.vocabulary.size == 260
    main(["prepare", source, "-o", output, "--format", "text", "--overwrite"])
    assert open_store(output).tokens == len(Path(source).read_bytes()) + 1
    assert f"{output}: 1 documents, 25 tokens of uint16" in capsys.readouterr().out


def test_a_failing_disk_exits_with_1(lines, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("armillary.data.prepare.preparation.StoreWriter", full)
    code, line = refused(capsys, "prepare", lines, "-o", tmp_path / "other")
    assert code == 1 and line.startswith(f"armillary-data: {tmp_path / 'other'}: No space left on device; ")


def test_an_interrupt_is_one_line(store, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("armillary.data.cli.print_info", interrupt)
    assert refused(capsys, "info", store) == (130, "armillary-data: stopped")


# -- info -------------------------------------------------------------------------------------------------------------


def test_info_shows_counts_and_lengths(store, capsys):
    main(["info", str(store)])
    out, err = capsys.readouterr()
    shown = dict(re.split("  +", line, maxsplit=1) for line in out.splitlines() if re.match(r"\w.*  ", line))
    tokens = sum(LENGTHS) + len(LENGTHS)  # each has an end
    assert (shown["documents"], shown["tokens"], shown["bytes"]) == ("10", str(tokens), str(2 * tokens))
    assert (shown["tokenizer"], shown["vocabulary"], shown["longest, tokens"]) == ("bytes", "257", "101")
    rows = columns_of(out)
    assert [(row[0], row[1]) for row in rows[1:]] == [
        ("2 to 3", "3"), ("4 to 7", "1"), ("8 to 15", "2"), ("16 to 31", "1"), ("32 to 63", "1"), ("64 to 127", "2"),
    ]  # fmt: skip
    assert rows[-1][2] == f"{100 * 166 / tokens:.1f}" and "\x1b" not in out + err


def test_info_as_json_has_the_figures_of_describe(store, capsys):
    main(["info", str(store), "--json"])
    actual = json.loads(capsys.readouterr().out)
    bins = actual.pop("histogram")
    assert actual == describe(open_store(store))
    lengths = sorted(length + 1 for length in LENGTHS)
    assert (actual["documents"], actual["tokens"], actual["longest"]) == (10, sum(lengths), 101)
    assert (actual["bytes"], actual["dtype"]) == (2 * sum(lengths), "uint16")
    assert actual["mean_length"] == pytest.approx(sum(lengths) / 10)
    assert actual["p50"] == (lengths[4] + lengths[5]) / 2
    assert (actual["tokenizer"], actual["vocabulary"], actual["end_of_document"]) == ("bytes", 257, 256)
    assert actual["p10"] <= actual["p50"] <= actual["p90"] <= actual["p99"] <= actual["longest"]
    assert bins[0] == {"minimum": 2, "maximum": 3, "documents": 3, "tokens": 7}
    assert sum(b["tokens"] for b in bins) == actual["tokens"]


def test_verify_reads_every_byte(store, tmp_path, capsys):
    deep = tmp_path / "[bold] name" / ("long " * 20)
    deep.mkdir(parents=True)
    store = store.rename(deep / "store")
    main(["info", str(store), "--verify"])
    size = 2 * (sum(LENGTHS) + 10) + 8 * 11 + 8 * 10
    assert re.match(rf"{re.escape(str(store))}: all {size} bytes ", capsys.readouterr().err.splitlines()[-1])
    for name in ("tokens.bin", "documents.bin", "hashes.bin"):
        data = bytearray((store / name).read_bytes())
        data[16] ^= 1
        (store / name).write_bytes(data)
        with pytest.raises(SystemExit) as stop:
            main(["info", str(store), "--verify"])
        line = capsys.readouterr().err.splitlines()[-1]
        assert stop.value.code == 2
        assert f"{name}: bytes 0 to {len(data) - 1} " in line
        data[16] ^= 1
        (store / name).write_bytes(data)


def test_the_console_script_is_this_command():
    (script,) = entry_points(group="console_scripts", name="armillary-data")
    assert script.load() is main


# -- figures ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5000), max_size=40))
@settings(deadline=None, max_examples=25)
def test_histogram_counts_every_document_and_token_once(lengths):
    bins = histogram(np.array(lengths, np.int64))
    edges = [(0, 0), *((2**b, 2 ** (b + 1) - 1) for b in range(13))]
    counted = [[n for n in lengths if low <= n <= high] for low, high in edges]
    every = [Bin(*edge, len(inside), sum(inside)) for edge, inside in zip(edges, counted, strict=True)]
    used = [i for i, actual in enumerate(every) if actual.documents]
    assert bins == (every[used[0] : used[-1] + 1] if used else [])


def test_info_has_the_bytes_and_the_balance_of_each_layout(store, capsys):
    arguments = ["--length", "64", "--shards", "4", "--rows", "3", "--kv-heads", "2", "--head-dim", "16"]
    main(["info", str(store), *arguments, "--json"])
    actual = json.loads(capsys.readouterr().out)
    sample = packed_rows(open_store(store), 64, best_fit, 3)
    pieces = sum(len(row.pieces) for row in sample) / len(sample)
    sizes = {"length": 64, "shards": 4, "rows": len(sample), "pieces": pieces, "packing": "best_fit"}
    assert actual["packed"] == sizes and actual["documents"] == 10
    by_name = {each["layout"]: each for each in actual["layouts"]}
    assert {"zigzag", "contiguous", "striped", "balanced"} <= set(by_name) <= set(LAYOUTS)
    for name in ("zigzag", "contiguous", "striped"):
        layout, each = getattr(SequenceLayout, name)(64, 4), by_name[name]
        balances = [attention_balance(layout, documents=row.ends) for row in sample]
        assert (each["pairs"], each["worst_pairs"]) == pytest.approx((sum(balances) / len(balances), max(balances)))
        assert each["tokens"] == each["worst_tokens"] == 1
        hops = sum(attention_traffic(layout, documents=row.ends) for row in sample) / len(sample)
        assert each["hops"] == pytest.approx(hops / 64)
        # k and v in bfloat16, forward and backward, and their gradients in float32.
        assert each["sent_bytes"] == pytest.approx(hops / 4 * 2 * 2 * 16 * (2 + 2 + 4))
    main(["info", str(store), *arguments])
    shown = capsys.readouterr().out
    assert all(name in shown for name in by_name)


def test_unsplit_documents_send_nothing_and_need_as_many_documents_as_shards():
    sample = packed_rows(store_of([15] * 8), 64, best_fit, 2)
    every = {each.layout: each for each in measure_layouts(sample, 4, 1)}
    assert every["uncut documents"].hops == every["balanced"].hops == 0
    assert every["uncut documents"].pairs == every["uncut documents"].tokens == 1
    assert "uncut documents" not in {each.layout for each in measure_layouts(sample, 8, 1)}
