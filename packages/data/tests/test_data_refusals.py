"""Tables of wrong command lines, calls and files: each is refused in one line that names it, and no file changes."""

import builtins
import io
import json
import os
import re
import shlex
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import accumulate
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_stores import megatron_index, numbered, single_rank_rows

from armillary.core import SequenceLayout
from armillary.core.testing import refusal
from armillary.data import (
    ByteTokenizer,
    Document,
    TextTokenizer,
    TokenStore,
    Vocabulary,
    best_fit,
    greedy,
    open_store,
    prefix_tree,
    read_documents,
    tree_batch,
    verify_folder,
)
from armillary.data.cli import main
from armillary.data.console import byte_quantity, quantity, whole_number
from armillary.data.internal import tokenizer_of
from armillary.data.loader.packed_sequences import Epochs
from armillary.data.packing import Packed
from armillary.data.prepare import Preparation, prepare
from armillary.data.prepare.sources import chunks
from armillary.data.text.tokenizer import train_bpe

DEEP = "[" * 100_000
FILES = {
    "empty": b"",
    "text.txt": b"some words\n" * 40,
    "lines.jsonl": b'{"text": "hello"}\n' * 9,
    "blank.jsonl": b'{"text": ""}\n' * 2,
    "noise.bin": bytes(range(256)) * 20,
    "packed.json.gz": b"\x1f\x8bjunk",
    "table.arrow": b"ARROW1junk",
    "noise": bytes(1 + i * 37 % 255 for i in range(5000)),
    "cut.jsonl": b'{"text": "hel',
    "other.jsonl": b'{"body": "x"}\n',
    "latin.txt": b"caf\xe9",
    "text-16.txt": "text".encode("utf-16"),
    "records.json": b'[\n {"text": "a"}, {"id": "b", "content": "longer"}]',
    "latin.jsonl": b'{"text": "caf\xe9"}\n',
    "no.parquet": b"PAR1 is how it begins",
    "text.zst": b"(\xb5/\xfd",
    "bad.jsonl.gz": b"not packed",
    "list.json": b"[1]",
    "deep.json": DEEP.encode(),
    "binary.json": bytes(range(256)),
    "vocabulary.json": b'{"model": {"vocab": 3}}',
    "no-end.json": b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}',
    "pair.bin": b"\0" * 8,
    "pair.idx": b"MMIDIDX\0\0 and then something else",
    "alone.bin": b"\0" * 8,
    "line\nbreak": b"",
    "texts/secret": b"text",
    "texts/locked/file": b"text",
    "no-text/deep/file": b"",
    "foreign.partial/notes": b"precious",
    "megatron/data.bin": bytes(14),
    "megatron/data.idx": megatron_index([3, 4], [0, 1, 2]),
    "bpe/tokenizer.json": train_bpe(iter(["some words"]), 260).definition,
    "bpe-odd/tokenizer_config.json": b"{",
}
"""Files of the folder in which all of this happens."""
COLUMNS = {"text": ["a", "b"], "ids": [[1], [2]], "scores": [[1.0], [2.0]], "label": [1, 2], "nested": [[[1]], [[2]]]}
TOKENS = [[1, 2, 3, 4], [], [5, 6, 7], [8]]
SAVED = {
    "saved": {"input_ids": [list(range(5000))] * 8},
    "saved-columns": COLUMNS,
    "saved-null": {"input_ids": [[1], None, [2]]},
    "saved-null-token": {"input_ids": [[1, None, 2], [3]]},
    "saved-empty": {"input_ids": []},
    "saved-labels": {"input_ids": TOKENS, "labels": TOKENS},
    "saved-short": {"input_ids": TOKENS, "labels": [[1], [], [2], [3]]},
}
"""Datasets saved by Hugging Face `datasets`: columns."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all files, datasets and tokenizers, and a store of 9 documents of 6 tokens in `store`."""
    root = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "folder").mkdir()
    (root / "unfinished.partial").mkdir()
    os.mkfifo(root / "pipe")
    for name, target in {"loop": "pool", "pool": "loop", "link": "texts", "text-link": "text.txt"}.items():
        (root / name).symlink_to(root / target)
    shutil.copy(root / "bpe/tokenizer.json", root / "bpe-odd")
    pq.write_table(pa.table({"id": [1, 2], "text": ["a", "b"]}), root / "table.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), root / "empty.parquet")
    datasets.disable_progress_bars()
    for name, columns in SAVED.items():
        datasets.Dataset.from_dict(columns).save_to_disk(root / name, num_shards=2 if name == "saved" else None)
    part = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(root / "splits")
    shutil.copytree(root / "splits", root / "several/both", ignore=lambda *_: ["dataset_dict.json"])
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        main(["prepare", str(root / "lines.jsonl"), "-o", str(root / "store"), "--workers", "1"])
    shutil.copytree(root / "store", root / "store-flipped")
    flipped = np.memmap(root / "store-flipped" / "tokens.bin", "<u2", "r+")
    flipped[2 * 6 + 3] += 2**14  # a token of the third document
    flipped.flush()
    return root


def times_of_files(folder):
    return {path: path.is_file() and path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture
def in_folder(folder, monkeypatch):
    """Makes the folder the working directory, in which no file may change."""
    monkeypatch.chdir(folder)
    before = times_of_files(folder)
    yield
    assert times_of_files(folder) == before


# -- command lines ----------------------------------------------------------------------------------------------------

COMMANDS = [
    ("", "{prepare, info}"),
    ("nothing", "nothing"),
    ("--verbose", "--verbose"),
    ("pack store --length 16", "pack: .*info STORE --length N"),
    ("inspect store --length 16", "inspect: .*info STORE --length N"),
    ("prepare", "--output PATH"),
    ("prepare -o out", "inputs"),
    ("prepare text.txt", "--output PATH"),
    ("prepare nowhere -o out", "nowhere .*No such file"),
    ("prepare empty -o out", "empty "),
    ("prepare folder -o out", "folder "),
    ("prepare loop -o out", "loop "),
    ("prepare pipe -o out", "pipe "),
    ("prepare a\0b -o out", r"a\\x00b"),
    ("prepare noise.bin -o out", "noise.bin "),
    ("prepare noise -o out", "noise .*2,507.*--format text"),
    ("prepare packed.json.gz -o out", "packed.json.gz "),
    ("prepare table.arrow -o out", "table.arrow "),
    ("prepare store -o out", "store "),
    ("prepare noise.bin -o out --format jsonl", "noise.bin:line 1: "),
    ("prepare noise.bin -o out --format parquet", "noise.bin "),
    ("prepare no.parquet -o out", "no.parquet .*Parquet"),
    ("prepare text.zst -o out", "text.zst .*zstd"),
    ("prepare bad.jsonl.gz -o out", "bad.jsonl.gz "),
    ("prepare cut.jsonl -o out", "cut.jsonl:line 1: "),
    ("prepare other.jsonl -o out", "'body'.*--text-field body"),
    ("prepare records.json -o out", "records.json:record 1: .*--text-field content"),
    ("prepare text-16.txt -o out", "text-16.txt .*UTF-16"),
    ("prepare latin.txt -o out --invalid refuse", "latin.txt: .*UTF-8"),
    ("prepare latin.jsonl -o out --invalid refuse", "latin.jsonl:line 1: "),
    ("prepare lines.jsonl -o out --text-field body", "lines.jsonl:line 1: .*'body'.*'text'"),
    ("prepare text.txt -o /proc/none", "/proc/none: "),
    ("prepare text.txt -o /dev/null/none", "/dev/null/none: "),
    ("prepare text.txt -o empty/store", "empty/store: "),
    (f"prepare text.txt -o {'x' * 300}", "File name too long"),
    ("prepare text.txt -o a\0b", r"a\\x00b"),
    ("prepare text.txt -o ''", r"output \. "),
    ("prepare '' -o folder/out", "output folder/out"),
    ("prepare text.txt -o text.txt", "output text.txt"),
    ("prepare text.txt -o text.txt/store", "output text.txt/store"),
    ("prepare texts -o texts/store --overwrite", "output texts/store "),
    ("prepare texts/secret -o texts --overwrite", "texts/secret "),
    ("prepare text.txt -o .", r"output \. "),
    ("prepare text.txt -o /", "output /"),
    ("prepare text.txt -o texts", "texts .*not a token store"),
    ("prepare text.txt -o texts --overwrite", "texts .*not a token store"),
    ("prepare text.txt -o noise --overwrite", "noise .*not a token store"),
    ("prepare text.txt -o link --overwrite", "texts .*not a token store"),
    ("prepare text.txt -o loop", "loop "),
    ("prepare text.txt -o foreign --overwrite", "foreign.partial"),
    ("prepare text.txt -o store", "store .*--overwrite"),
    ("prepare lines.jsonl -o store --invalid skip", "store .*--overwrite"),
    ("prepare lines.jsonl -o store --tokenizer bpe", "store .*--overwrite"),
    ("prepare text.txt text.txt -o out --invalid never", "'never'"),
    ("prepare text.txt -o out --format docx", "format='docx'"),
    ("prepare text.txt -o out --format trees", "format='trees' .*prefix_tree"),
    ("prepare text.txt -o out --workers 0", "--workers .*1; got 0"),
    ("prepare text.txt -o out --workers many", "'many'"),
    ("prepare text.txt -o out --tokenizer ''", "tokenizer.json"),
    ("prepare text.txt -o out --tokenizer nowhere", "nowhere .*No such file"),
    ("prepare text.txt -o out --tokenizer folder", "tokenizer.json "),
    ("prepare text.txt -o out --tokenizer list.json", "list.json: "),
    ("prepare text.txt -o out --tokenizer deep.json", "deep.json: "),
    ("prepare text.txt -o out --tokenizer binary.json", "binary.json: "),
    ("prepare text.txt -o out --tokenizer vocabulary.json", "vocabulary.json: "),
    ("prepare text.txt -o out --tokenizer no-end.json", "no-end.json: "),
    ("prepare text.txt -o out --tokenizer bpe --vocab-size -5", "--vocab-size .*257.*-5"),
    ("prepare text.txt -o out --tokenizer bpe --vocab-size 9999999999", "--vocab-size "),
    ("prepare text.txt -o out --end-of-document x", "end_of_document='x'"),
    ("prepare text.txt -o out --tokenizer bpe --end-of-document x", r"end_of_document='x' .*'<\|endoftext"),
    ("prepare text.txt -o out --begin-of-document x", "begin_of_document='x' .*'bytes'"),
    ("prepare text.txt -o out --tokenizer bpe --begin-of-document '<s>'", "begin_of_document='<s>' "),
    ("info", "PATH"),
    ("info ''", r"\. "),
    ("info 'line\nbreak'", "line break "),
    ("info a\0b", r"a\\x00b "),
    ("info \x1b[31mred", r"\\x1b\[31mred "),
    (f"info {'x' * 5000}", "x{5000}"),
    ("info nowhere", "nowhere "),
    ("info folder", "folder "),
    ("info /", "/ "),
    ("info text.txt", "text.txt "),
    ("info noise.bin", "noise.bin "),
    ("info loop", "loop "),
    ("info unfinished", "unfinished.partial"),
    ("info pair", "pair.idx "),
    ("info alone.bin", "alone.bin "),
    ("info text.txt --verify", "text.txt "),
    ("info store-flipped --verify", "tokens.bin: bytes 0 to 107"),
    ("info store --plot x.png", "--plot: .*--json"),
    ("info store --column words", "--column words: "),
    ("info store --rows", "--rows"),
    ("info store --length 0", "1; got 0"),
    ("info store --length ''", "--length.*''"),
    ("info store --length ten", "--length: .*'ten'"),
    ("info store --length ٣", "--length"),
    ("info store --length 64KiB", r"--length: .*'64KiB'.*64Ki \(65,536\)"),
    ("info store --length 64k", "64,000"),
    ("info store --length 1000000000", "1,000,000,000"),
    (f"info store --length {'9' * 5000}", "--length"),
    ("info store --length 16 --shards 0", "--shards "),
    ("info store --length 16 --shards 17", "17"),
    ("info store --length 16 --rows 0", "^armillary-data: --rows .*1; got 0"),
    ("info store --length 16 --kv-heads 0", "--kv-heads "),
    ("info store --length 16 --packing none", "--packing"),
]


def numbered_ids(rows):
    return [f"{number} {row[0]}"[:60] for number, row in enumerate(rows)]


@pytest.mark.parametrize(("line", "message"), COMMANDS, ids=numbered_ids(COMMANDS))
def test_commands_are_refused(in_folder, line, message):
    assert re.search(message, refusal(main, shlex.split(line)))


# -- calls ------------------------------------------------------------------------------------------------------------

N = 4
STORE, TWO = numbered([8]), [numbered([30, 5, 0, 80]), numbered([9, 9, 40], name="other")]
BYTES, BPE = ByteTokenizer(), TextTokenizer(FILES["bpe/tokenizer.json"])


def store_of(*lengths, vocabulary=None):
    ends = np.cumsum([0, *lengths])
    return TokenStore("numbered", [np.arange(ends[-1])], ends[:-1], ends[1:], vocabulary or Vocabulary(), "content")


def rows(stores=STORE, **settings):
    return single_rank_rows(stores, N, **settings)


def packing_of(*epochs):
    """A packing that returns these rows, lists of (document, start, length), one list of rows per epoch."""
    calls = iter(epochs)

    def pack(lengths, length, key):
        chosen = next(calls)
        columns = np.array([piece for row in chosen for piece in row]).T
        return Packed(*columns, np.array([0, *accumulate(map(len, chosen))]))

    return pack


def third_row(*epochs):
    return Epochs(numbered([5, 3]), 4, packing_of(*epochs), "key").row(2)


def load_state(**changes):
    return rows().load_state_dict(rows().state_dict() | changes)


def load_state_of_other_rows(length=N, stores=TWO, weights=(1, 2), **settings):
    """Loads the state of these rows into others, which keep their own."""
    state = single_rank_rows(stores, length, weights=weights[: len(stores)], **settings).state_dict()
    loaded = rows(TWO, weights=[1, 2])
    next(loaded)
    try:
        loaded.load_state_dict(state)
    finally:
        assert loaded.state_dict()["rows"] == 1


CALLS = {
    "TokenStore": [
        (lambda: TokenStore.of([], BYTES), "documents: "),
        (lambda: TokenStore.of([Document("a", b""), Document("b", b"")], BYTES), "documents: "),
        (lambda: store_of(3, -1), r"numbered: document 1 of 2 .* 2, .* 3 .*byte 16"),
        (lambda: store_of(3, 4).split(0), "validation_fraction=0 "),
        (lambda: store_of(3, 4).split(1), "validation_fraction=1 "),
        (lambda: store_of(3, 4).split(float("nan")), "validation_fraction=nan "),
        (lambda: store_of(1).split(0.5), "numbered .*1 tokens .* 2"),
        (lambda: store_of(0).split(), "numbered .*0 tokens"),
        (lambda: store_of(3).select(np.array([False])).split(), "numbered .*0 tokens"),
        (
            lambda: TokenStore("n", [np.array([1, -7])], [0], [2], Vocabulary(size=9), "c").read(0, 0, 2),
            r"n: token 1 of document 0 \(token 1 of the store\) is -7, .*vocabulary of 9",
        ),
        (
            lambda: open_store("store-flipped").read(2, 1, 6, 2),
            r"store-flipped: token 3 of document 2 \(token 15 of the store\) is 16492, .*vocabulary of 257",
        ),
        (
            lambda: open_store("saved-labels").with_vocabulary(5).read_labels(2, 1, 3),
            "token 1 of document 2 .* is 6, .*vocabulary of 5",
        ),
    ],
    "open_store": [
        (lambda: open_store("alone"), "alone does not exist"),
        (lambda: open_store("unfinished.partial"), "unfinished.partial "),
        (lambda: open_store("store", BPE), "store .*bytes.*sha256:"),
        (lambda: open_store("splits"), "splits .*: splits/train, splits/test"),
        (lambda: open_store("saved-columns"), "saved-columns .*'input_ids'.* text, ids, scores, label, nested"),
        (lambda: open_store("saved-columns", column="text"), "saved-columns: .*'text'"),
        (lambda: open_store("saved-columns", column="scores"), "saved-columns: .*'scores'"),
        (lambda: open_store("saved-columns", column="label"), "saved-columns: .*'label'"),
        (lambda: open_store("saved-columns", column="nested"), "saved-columns: .*'nested'"),
        (lambda: open_store("saved-null"), "saved-null: .*'input_ids' has missing"),
        (lambda: open_store("saved-null-token"), "saved-null-token: .*'input_ids' has missing"),
        (lambda: open_store("saved-empty"), "saved-empty"),
        (lambda: open_store("saved-short"), "'labels' .*'input_ids'"),
    ],
    "tokenizer_of": [
        (lambda: tokenizer_of(Path("saved")), "saved does not have its tokenizer"),
        (lambda: tokenizer_of(Path("none")), "none does not exist"),
    ],
    "PackedSequences": [
        (lambda: rows([]), "no stores"),
        (lambda: rows(numbered([0, 0], name="x/y")), "x/y .*no tokens"),
        (lambda: rows([STORE, store_of(8), store_of(8, vocabulary=BYTES_VOCABULARY)]), "bytes.*numbers.*stores"),
        (lambda: rows(shard=1), "shard 1 .*0..0"),
        (lambda: rows(shard=-1), "shard -1 .*0..0"),
        (lambda: rows(rows_per_batch=0), "rows_per_batch .*1; got 0"),
        (lambda: rows(replica=2, replicas=2), "replica 2 .*0..1"),
        (lambda: rows(replica=-1), "replica -1 .*0..0"),
        (lambda: rows(replicas=0), "replicas .*1; got 0"),
        (lambda: rows(ahead=-1), "ahead .*0; got -1"),
        (lambda: rows(TWO, weights=[]), r"weights \[\]: .*2 stores"),
        (lambda: rows(weights=[0]), r"weights \[0\]"),
        (lambda: rows(weights=[-1]), r"weights \[-1\]"),
        (lambda: rows(weights=[float("nan")]), r"weights \[nan\]"),
        (lambda: rows(weights=[float("inf")]), r"weights \[inf\]"),
        (lambda: rows(packing=lambda *arguments: greedy(*arguments)), "packing .* name"),
        (lambda: rows(layout_for=lambda _: SequenceLayout.zigzag(N, 2)).batch(0), f"layout_for .* 1 shards of {N} "),
        (lambda: rows(layout_for=lambda _: SequenceLayout.zigzag(5, 1)).batch(0), f"layout_for .* 1 shards of {N} "),
        (lambda: rows().batch(-1), "step .*0; got -1"),
        (lambda: rows(store_of(5, 8, vocabulary=Vocabulary(size=9))).batch(2), "is 9, .*vocabulary of 9"),
        (lambda: third_row([[(0, 0, 4)], [(0, 4, 1)]], [[(0, 0, 4)]]), "1 .*epoch 1.*2 .*epoch 0"),
        (lambda: third_row([[(0, 0, 4), (1, 0, 1)]]), "5 .*row 0.*4"),
        (lambda: third_row([[(0, 0, 2)], [(1, 0, 0)]]), "0 .*row 1.*4"),
    ],
    "load_state_dict": [
        (lambda: rows().load_state_dict({}), "version None"),
        *[
            (lambda number=number: load_state(rows=number), re.escape(f"rows={number!r}"))
            for number in ("many", True, -1, 2.0, None, 10**18)
        ],
        (lambda: load_state_of_other_rows(stores=TWO[:1]), "stores .*, not "),
        (lambda: load_state_of_other_rows(stores=TWO[::-1]), "stores .*, not "),
        (lambda: load_state_of_other_rows(stores=[TWO[0], numbered([9, 9, 41])]), "stores .*, not "),
        (lambda: load_state_of_other_rows(weights=[1, 3]), "weights .*, not "),
        (lambda: load_state_of_other_rows(length=N + 1), "sequence_length 5, not 4"),
        (lambda: load_state_of_other_rows(packing=best_fit), "packing .*best_fit, not "),
        (lambda: load_state_of_other_rows(seed=1), "seed 1, not 0"),
    ],
    "trees": [
        (lambda: prefix_tree([]), "sequences"),
        (lambda: prefix_tree([[1], []]), r"sequences .*\(0,\)"),
        (lambda: prefix_tree([[[1, 2]]]), r"sequences .*\(1, 2\)"),
        (lambda: prefix_tree([[1, 2]], trained=[[1]]), r"trained .*\(1,\).*\(2,\)"),
        (lambda: prefix_tree([[1, 2]], weights=[1, 2]), "2 weights"),
        (lambda: prefix_tree([[1, 2]], weights=[-1]), r"weights \[-1.0\]"),
        (lambda: prefix_tree([[1, 2]], weights=[float("nan")]), r"weights \[nan\]"),
        (lambda: tree_batch([], SequenceLayout.contiguous(2, 1)), r"trees of \[\]"),
        (lambda: tree_batch([prefix_tree([[1, 2, 3]])], SequenceLayout.contiguous(2, 1)), r"trees of \[3\] .* 2"),
    ],
    "tokenizers": [
        (lambda: TextTokenizer(b""), "tokenizer.json"),
        (lambda: TextTokenizer(b"{}"), "tokenizer.json"),
        (lambda: TextTokenizer(b'{"model": {}}'), "tokenizer.json"),
        (lambda: TextTokenizer(b'{"model": {"vocab": {"</s>": 0}}}'), "tokenizer.json"),
        (lambda: TextTokenizer(b'{"model": {"vocab": {}}, "added_tokens": [3]}'), "tokenizer.json.*added tokens"),
        (lambda: TextTokenizer.read("bpe", "</s>"), r"end_of_document='</s>'.* '<\|endoftext\|>'"),
        (lambda: TextTokenizer.read("bpe", begin_of_document="<s>"), "begin_of_document='<s>'"),
        (lambda: TextTokenizer.read("bpe-odd"), "tokenizer_config.json"),
        (lambda: BPE.decode(torch.tensor([65, -1])), r"token -1 .*0\.\."),
        (lambda: BPE.decode(torch.tensor([65, BPE.vocab_size])), rf"token {BPE.vocab_size} .*0\.\."),
        (lambda: BPE.encode("\ud800"), "surrogate"),
        (lambda: BYTES.decode(torch.tensor([65, -1])), r"token -1 .*0\.\.256"),
        (lambda: BYTES.decode(torch.tensor([65, 257])), r"token 257 .*0\.\.256"),
    ],
    "read_documents": [
        (lambda: read_documents("none"), "none .*No such file"),
        (lambda: read_documents("folder"), "folder "),
        (lambda: read_documents("no-text"), "no-text "),
        (lambda: read_documents("empty"), "empty "),
    ],
    "prepare": [
        (lambda: prepare(Preparation([], Path("out")), 1), "no inputs"),
        (lambda: prepare(Preparation([Path("blank.jsonl")], Path("out")), 1), "blank.jsonl: "),
        (lambda: prepare(Preparation([Path("text.txt")], Path("out"), chunk_bytes=0), 1), "1.*got 0"),
        (lambda: chunks([Path("no-text")]), "no-text "),
        (lambda: chunks([Path("empty.parquet")]), "empty.parquet "),
        (lambda: chunks([Path("text.txt")], format="csv"), "format='csv' .*'auto', 'text', 'jsonl', 'parquet'"),
        (lambda: chunks([Path("text.txt"), Path("text.txt")]), "twice.* text.txt;"),
        (lambda: chunks([Path("texts/secret"), Path("texts")]), "twice.* texts/secret;"),
        (lambda: chunks([Path("text.txt"), Path("text-link")]), "twice.* text.txt;"),
        (lambda: chunks([Path("table.parquet")], text_field="body"), "table.parquet .*'body'.*: text$"),
        (lambda: chunks([Path("table.parquet")], text_field="id"), "table.parquet: .*'id' .*int64.*: text$"),
        (lambda: chunks([Path("saved-columns")], text_field="body"), "saved-columns .*'body'.*: text$"),
        (lambda: chunks([Path("splits")]), "splits .*: splits/train, splits/test"),
        (lambda: chunks([Path("several")]), "several .*: several/both/test"),
    ],
    "quantities": [
        *[
            (lambda text=text: quantity(text), re.escape(f"{text!r}") + r".* 64k \(64,000\)")
            for text in ("", "M", "-3", "0", "1.5", "5X", "64K", "nan", "inf", "1e-3", "1e999", "1e1.5", "0x10", "٣")
        ],
        (lambda: quantity("64KiB"), r"'64KiB'.*64Ki \(65,536\)"),
        (lambda: whole_number("5MB"), r"'5MB'.*64Ki \(65,536\)"),
        (lambda: whole_number("1e99"), r"'1e99' .*2\^63 - 1"),
        *[
            (lambda text=text: byte_quantity(text), f"{text!r}.*80GB")
            for text in ("64Ki", "5M", "0GB", "-1GB", "1.5B", "five")
        ],
    ],
}
BYTES_VOCABULARY = Vocabulary("bytes", 257, 256)
CALL_ROWS = [(name, *row) for name, group in CALLS.items() for row in group]


@pytest.mark.parametrize(("name", "call", "message"), CALL_ROWS, ids=numbered_ids(CALL_ROWS))
def test_calls_are_refused(in_folder, name, call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert re.search(message, str(error.value)) and "\n" not in str(error.value)


# -- broken files -----------------------------------------------------------------------------------------------------


def verified(path):
    return list(verify_folder(Path(path)))


def header(**changes):
    """Changes values of a store's header; None removes one."""

    def change(text):
        values = json.loads(text) | changes
        return json.dumps({name: value for name, value in values.items() if value is not None}).encode()

    return change


def vocabulary(**changes):
    return lambda text: header(vocabulary=json.loads(text)["vocabulary"] | changes)(text)


def cut(size):
    return lambda content: content[:size]


def boundary(number, value):
    """Changes where a document of the store begins, an integer in `documents.bin`."""
    return lambda content: content[: 8 * number] + np.int64(value).tobytes() + content[8 * number + 8 :]


def longer(content):
    return content + b"abcd"


def entries(lengths, boundaries, pointers=None):
    return lambda content: megatron_index(lengths, boundaries, pointers=pointers)


SHARD = "data-00001-of-00002.arrow"
BROKEN = [
    # path, file, its new bytes or a function of the old ones (None: it is missing), words of the error
    *[
        (path, file, change, message)
        for path in ("store", "verified store")
        for file, size in {"tokens.bin": 108, "documents.bin": 80, "hashes.bin": 72}.items()
        for change, message in {
            cut(0): f"{file} .*byte 0; .* {size} bytes",
            cut(-1): f"{file} .*byte {size - 1}; .* {size} bytes",
            longer: f"{file} has {size + 4} bytes; .* {size} bytes",
            None: f"{file} .*No such file.* {size} bytes",
        }.items()
    ],
    ("store", "documents.bin", boundary(2, 5), r"store: document 1 of 9 .* 5, .* 6 \(byte 16 "),
    ("store", "documents.bin", boundary(0, 1), "documents.bin .*from 1 to 54 .*from 0 to 54"),
    ("store", "documents.bin", boundary(9, 53), "documents.bin .*from 0 to 53 .*from 0 to 54"),
    ("store", "store.json", b"", "store.json "),
    ("store", "store.json", b"\xff\xfe", "store.json "),
    ("store", "store.json", b"[]", "store.json "),
    ("store", "store.json", DEEP.encode(), "store.json "),
    ("store", "store.json", b"{}", "store.json "),
    ("verified store", "store.json", b"{", "store.json "),
    ("store", "store.json", b'{"format": "armillary token store", "version": 1}', "store.json "),
    ("store", "store.json", header(version=7), "store.json .*version 7"),
    ("store", "store.json", header(version=7, colour="red", checksums=None), "store.json .*version 7"),
    ("store", "store.json", header(version=2, segments=3), "store.json .*version 2; .*prefix_tree"),
    ("store", "store.json", header(format="another store"), "store.json .*'another store' version 1"),
    ("store", "store.json", header(dtype="float32"), "store.json .*dtype='float32'"),
    ("store", "store.json", header(dtype="uint99"), "store.json .*'uint99'"),
    ("store", "store.json", header(dtype=None), "store.json "),
    ("store", "store.json", header(tokens=5400), "tokens.bin "),
    ("store", "store.json", header(tokens="54"), "store.json .*tokens='54'"),
    ("store", "store.json", header(tokens=5.5), "store.json .*tokens=5.5"),
    ("store", "store.json", header(tokens=-1), "store.json .*tokens=-1"),
    ("store", "store.json", header(tokens=None), "store.json "),
    ("store", "store.json", header(documents=-9), "store.json .*documents=-9"),
    ("store", "store.json", header(documents=True), "store.json .*documents=True"),
    ("store", "store.json", header(documents=None), "store.json "),
    ("store", "store.json", header(vocabulary=None), "store.json "),
    ("store", "store.json", header(vocabulary={"colour": 3}), "store.json "),
    ("store", "store.json", vocabulary(size="many"), "store.json "),
    ("store", "store.json", vocabulary(size=float("nan")), "store.json "),
    ("store", "store.json", vocabulary(size=-1), "store.json .*vocabulary.size=-1"),
    ("store", "store.json", vocabulary(size=10**18), f"store.json .*vocabulary.size={10**18}"),
    ("store", "store.json", vocabulary(end_of_document=[1]), "store.json "),
    ("store", "store.json", vocabulary(tokenizer=7), "store.json "),
    ("store", "store.json", header(checksums={}), "store.json "),
    (
        "store",
        "store.json",
        header(checksums={"tokens.bin": [], "documents.bin": [1], "hashes.bin": [1]}),
        "store.json ",
    ),
    ("store", "store.json", header(colour="red"), "store.json "),
    ("store", "store.json", header(summary=3), "store.json "),
    ("store", "store.json", header(summary={"skipped": "many"}), "store.json "),
    ("megatron/data", "megatron/data.bin", cut(1), "data.bin .*byte 1; .*14 bytes"),
    ("megatron/data", "megatron/data.bin", longer, "data.bin has 18 bytes; .*14 bytes"),
    ("megatron/data", "megatron/data.idx", cut(0), "data.idx "),
    ("megatron/data", "megatron/data.idx", cut(33), "data.idx .*b'MMIDIDX"),
    ("megatron/data", "megatron/data.idx", cut(34), "data.idx .*byte 34; .*82 bytes"),
    ("megatron/data", "megatron/data.idx", cut(81), "data.idx .*byte 81; .*82 bytes"),
    ("megatron/data", "megatron/data.idx", longer, "data.idx has 86 bytes; .*82 bytes"),
    ("megatron/data", "megatron/data.idx", megatron_index([7], [0, 1], magic=b"TNTIDX\0\0\0"), "data.idx .*b'TNTIDX"),
    ("megatron/data", "megatron/data.idx", megatron_index([7], [0, 1], version=2), "data.idx .*version 2 .*version 1"),
    ("megatron/data", "megatron/data.idx", megatron_index([7], [0, 1], code=0), "data.idx .*0; .*1, 2, 3, 4, 5, 8"),
    ("megatron/data", "megatron/data.idx", megatron_index([7], [0, 1], code=6), "data.idx .*6; .*1, 2, 3, 4, 5, 8"),
    ("megatron/data", "megatron/data.idx", entries([3, 4], [0, 1, 2], [0, 8]), "data.idx: sequences"),
    ("megatron/data", "megatron/data.idx", entries([3, 4], [0, 1, 2], [-6, 0]), "data.idx: sequences"),
    ("megatron/data", "megatron/data.idx", entries([3, 4], [0, 1, 2], [2, 8]), "data.idx: sequences"),
    ("megatron/data", "megatron/data.idx", entries([3, -1, 5], [0, 1, 3], [0, 6, 4]), "data.idx: sequences"),
    ("megatron/data", "megatron/data.idx", entries([3, 4], [0, 1, 3]), "data.idx: documents .*2 sequences"),
    ("megatron/data", "megatron/data.idx", entries([3, 4], [0, -1, 2]), "data.idx: documents .*2 sequences"),
    ("megatron/data", "megatron/data.idx", entries([3, 4], [0, 2, 1, 2]), "data.idx: documents .*2 sequences"),
    ("megatron/data", "megatron/data.idx", entries([3, 4], [1, 2]), "data.idx: documents .*2 sequences"),
    ("megatron/data", "megatron/data.idx", entries([3, 4], [2]), "data.idx: documents .*2 sequences"),
    ("megatron/data", "megatron/data.idx", entries([3, 4], []), "data.idx: documents .*2 sequences"),
    ("saved", "state.json", b"", "saved "),
    ("saved", "state.json", b"[]", "saved "),
    ("saved", "state.json", b"{}", "saved "),
    ("saved", "state.json", None, "saved "),
    ("saved", "dataset_info.json", b"", "saved "),
    ("saved", "dataset_info.json", b"[]", "saved "),
    ("saved", "dataset_info.json", None, "saved "),
    ("saved", SHARD, cut(0), "saved "),
    ("saved", SHARD, cut(10), "saved "),
    ("saved", SHARD, cut(-100), "saved "),
    ("saved", SHARD, lambda content: content[: len(content) // 2], "saved "),
    ("saved", SHARD, None, "saved "),
]


@pytest.mark.parametrize(("path", "file", "change", "message"), BROKEN, ids=numbered_ids(BROKEN))
def test_broken_files_are_refused(folder, tmp_path, monkeypatch, path, file, change, message):
    monkeypatch.chdir(tmp_path)
    *checked, path = path.split()
    name = path.partition("/")[0]
    shutil.copytree(folder / name, name)
    broken = Path(file if "/" in file else f"{name}/{file}")
    if change is None:
        broken.unlink()
    else:
        broken.write_bytes(change(broken.read_bytes()) if callable(change) else change)
    with pytest.raises(ValueError) as error:
        verified(path) if checked else open_store(path)
    assert re.search(message, str(error.value)) and "\n" not in str(error.value)


# -- files without permission, and packages that are not installed ----------------------------------------------------

UNREADABLE = [
    (lambda: read_documents("texts/secret"), "texts/secret"),
    (lambda: read_documents("texts"), "texts/secret"),
    (lambda: read_documents("texts"), "texts/locked"),
    (lambda: chunks([Path("texts")]), "texts/secret"),
    (lambda: chunks([Path("texts")]), "texts/locked"),
    *[
        (lambda read=read: read("store"), f"store.*{name}")
        for read in (open_store, verified)
        for name in ("store.json", "tokens.bin", "documents.bin", "hashes.bin")
    ],
]


@pytest.mark.parametrize(("call", "path"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_files_without_permission_are_refused(in_folder, call, path):
    def refusing(real):
        def refuse(opened, *args, **kwargs):
            if re.search(f"{path}$", str(opened)):
                raise PermissionError(13, "Permission denied", str(opened))
            return real(opened, *args, **kwargs)

        return refuse

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError) as error:
        for module, name in ((os, "open"), (os, "scandir"), (io, "open"), (builtins, "open")):
            patch.setattr(module, name, refusing(getattr(module, name)))
        call()
    assert re.search(f"{path}.*Permission denied", str(error.value)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("module", "call", "extra"),
    [
        ("datasets", lambda: open_store("saved"), "datasets"),
        ("datasets", lambda: chunks([Path("saved-columns")]), "datasets"),
        ("pyarrow.parquet", lambda: chunks([Path("table.parquet")]), "parquet"),
        ("tokenizers", lambda: TextTokenizer(FILES["bpe/tokenizer.json"]), "tokenizers"),
    ],
    ids=range(4),
)
def test_missing_packages_are_named_with_their_extra(in_folder, monkeypatch, module, call, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=re.escape(f"'armillary-data[{extra}]'")):
        call()
