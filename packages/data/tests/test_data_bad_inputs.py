"""A table of invalid arguments, values and files: each gives one line of error that names it."""

import json
import os
import re
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from armillary.core import SequenceLayout
from armillary.core.testing import refusal
from armillary.data import (
    ByteTokenizer,
    Document,
    PackedSequences,
    TextTokenizer,
    TokenStore,
    Vocabulary,
    open_store,
    read_documents,
)
from armillary.data.cli import main
from armillary.data.prepare import Preparation, prepare

FILES = {
    "empty": b"",
    "text.txt": b"some words\n" * 40,
    "lines.jsonl": b'{"text": "hello"}\n' * 9,
    "noise.bin": bytes(range(256)) * 20,
    "packed.json.gz": b"\x1f\x8bjunk",
    "table.arrow": b"ARROW1junk",
    "noise": bytes(1 + i * 37 % 255 for i in range(5000)),
    "cut.jsonl": b'{"text": "hel',
    "list.jsonl": b"[1, 2]\n",
    "number.jsonl": b'{"text": 3}\n',
    "other.jsonl": b'{"body": "x"}\n',
    "deep.jsonl": b'{"text": ' + b"[" * 100_000 + b"\n",
    "latin.jsonl": b'{"text": "caf\xe9"}\n',
    "no.parquet": b"PAR1 is how it begins",
    "text.zst": b"(\xb5/\xfd",
    "bad.jsonl.gz": b"not packed",
    "list.json": b"[1]",
    "deep.json": b"[" * 100_000,
    "binary.json": bytes(range(256)),
    "vocabulary.json": b'{"model": {"vocab": 3}}',
    "no-end.json": b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}',
    "pair.bin": b"\0" * 8,
    "pair.idx": b"MMIDIDX\0\0 and then something else",
    "alone.bin": b"\0" * 8,
    "line\nbreak": b"",
}
"""Files of the folder in which all of this happens; `HEADERS` are stores beside them."""

HEADERS = {
    "store-empty": lambda text: "",
    "store-list": lambda text: "[]",
    "store-deep": lambda text: "[" * 100_000,
    "store-binary": lambda text: "\0\1\2",
    "store-version": lambda text: text.replace('"version": 1', '"version": 7'),
    "store-trees": lambda text: json.dumps({**json.loads(text), "version": 2, "segments": 3}),
    "store-dtype": lambda text: text.replace("uint16", "float32"),
    "store-no-dtype": lambda text: text.replace("uint16", "words"),
    "store-count": lambda text: text.replace('"documents": 9', '"documents": -9'),
    "store-true": lambda text: text.replace('"documents": 9', '"documents": true'),
    "store-vast": lambda text: text.replace('"size": 257', f'"size": {10**18}'),
    "store-many": lambda text: text.replace('"tokens": 54', '"tokens": 5400'),
    "store-words": lambda text: text.replace('"tokens": 54', '"tokens": "many"'),
    "store-no-tokens": lambda text: text.replace('"tokens": 54', '"words": 54'),
    "store-no-checksums": lambda text: json.dumps({**json.loads(text), "checksums": {}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all files, and a store in `store`."""
    root = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (root / name).write_bytes(content)
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe")
    (root / "loop").symlink_to(root / "pool")
    (root / "pool").symlink_to(root / "loop")
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        main(["prepare", str(root / "lines.jsonl"), "-o", str(root / "store"), "--workers", "1"])
    for name, change in HEADERS.items():
        shutil.copytree(root / "store", root / name)
        (root / name / "store.json").write_text(change((root / "store" / "store.json").read_text()))
    for name, size in {"store-cut": -4, "store-long": 4}.items():
        shutil.copytree(root / "store", root / name)
        tokens = root / name / "tokens.bin"
        tokens.write_bytes((tokens.read_bytes() + b"\0" * 8)[: 2 * 54 + size])
    shutil.copytree(root / "store", root / "store-flipped")
    flipped = np.memmap(root / "store-flipped" / "tokens.bin", "<u2", "r+")
    flipped[2 * 6 + 3] += 2**14  # a token of the third document
    flipped.flush()
    (root / "unfinished.partial").mkdir()
    return root


# -- command lines: arguments, and words of the error -----------------------------------------------------------------

COMMANDS = [
    ("", "{prepare, info}"),
    ("nothing", "nothing"),
    ("--verbose", "--verbose"),
    ("prepare", "--output PATH"),
    ("prepare -o out", "inputs"),
    ("prepare text.txt", "--output PATH"),
    ("prepare nowhere -o out", "nowhere "),
    ("prepare empty -o out", "empty "),
    ("prepare folder -o out", "folder "),
    ("prepare loop -o out", "loop "),
    ("prepare noise.bin -o out", "noise.bin "),
    ("prepare noise -o out", "noise "),
    ("prepare pipe -o out", "pipe "),
    ("prepare packed.json.gz -o out", "packed.json.gz "),
    ("prepare table.arrow -o out", "table.arrow "),
    ("prepare noise -o out", "2,507"),
    ("prepare noise.bin -o out --format jsonl", "noise.bin:byte 0: "),
    ("prepare noise.bin -o out --format parquet", "noise.bin "),
    ("prepare no.parquet -o out", "no.parquet "),
    ("prepare text.zst -o out", "text.zst "),
    ("prepare bad.jsonl.gz -o out", "bad.jsonl.gz "),
    ("prepare cut.jsonl -o out", "cut.jsonl:byte 0: "),
    ("prepare list.jsonl -o out", "list.jsonl:byte 0: "),
    ("prepare number.jsonl -o out", "'text'"),
    ("prepare other.jsonl -o out", "'body'"),
    ("prepare deep.jsonl -o out", "deep.jsonl:byte 0: "),
    ("prepare latin.jsonl -o out --invalid refuse", "latin.jsonl:byte 0: "),
    ("prepare lines.jsonl -o out --text-field body", "'body'"),
    ("prepare text.txt -o /proc/none", "/proc/none: "),
    ("prepare text.txt -o /dev/null/none", "/dev/null/none: "),
    ("prepare text.txt -o text.txt", "output text.txt"),
    ("prepare text.txt -o text.txt/store", "output text.txt/store"),
    ("prepare text.txt -o .", r"output \. "),
    ("prepare text.txt -o /", "output /"),
    ("prepare text.txt -o folder", "folder "),
    ("prepare text.txt -o loop", "loop "),
    ("prepare text.txt -o store", "--overwrite"),
    ("prepare store -o out", "store "),
    ("prepare text.txt text.txt -o out --invalid never", "'never'"),
    ("prepare text.txt -o out --format docx", "format='docx'"),
    ("prepare text.txt -o out --format trees", "format='trees' .*prefix_tree"),
    ("prepare text.txt -o out --workers 0", "1; got 0"),
    ("prepare text.txt -o out --workers -3", "1; got -3"),
    ("prepare text.txt -o out --workers many", "'many'"),
    ("prepare text.txt -o out --workers 1.5", "'1.5'"),
    ("prepare text.txt -o out --tokenizer nowhere", "nowhere "),
    ("prepare text.txt -o out --tokenizer folder", "tokenizer.json "),
    ("prepare text.txt -o out --tokenizer list.json", "list.json: "),
    ("prepare text.txt -o out --tokenizer deep.json", "deep.json: "),
    ("prepare text.txt -o out --tokenizer binary.json", "binary.json: "),
    ("prepare text.txt -o out --tokenizer vocabulary.json", "vocabulary.json: "),
    ("prepare text.txt -o out --tokenizer no-end.json", "no-end.json: "),
    ("prepare text.txt -o out --tokenizer bpe --vocab-size 256", "vocab_size"),
    ("prepare text.txt -o out --tokenizer bpe --vocab-size -5", "vocab_size"),
    ("prepare text.txt -o out --tokenizer bpe --vocab-size 9999999999", "vocab_size"),
    ("prepare text.txt -o out --end-of-document x", "end_of_document='x'"),
    ("prepare text.txt -o out --begin-of-document x", "begin_of_document='x'"),
    ("info", "PATH"),
    ("info nowhere", "nowhere "),
    ("info folder", "folder "),
    ("info text.txt", "text.txt "),
    ("info noise.bin", "noise.bin "),
    ("info loop", "loop "),
    ("info unfinished", "unfinished.partial"),
    ("info pair", "pair.idx "),
    ("info alone.bin", "alone.bin "),
    ("info store --plot x.png", "--plot: .*--json"),
    ("info store --column words", "--column words: "),
    ("info text.txt --verify", "text.txt "),
    ("info store-empty", "store.json "),
    ("info store-list", "store.json "),
    ("info store-deep", "store.json "),
    ("info store-binary", "store.json "),
    ("info store-version", "version 7"),
    ("info store-trees", "version 2; .*prefix_tree"),
    ("info store-dtype", "dtype='float32'"),
    ("info store-no-dtype", "store.json "),
    ("info store-count", "documents=-9"),
    ("info store-true", "documents=True"),
    ("info store-vast", f"vocabulary.size={10**18}"),
    ("info store-many", "tokens.bin "),
    ("info store-words", "tokens='many'"),
    ("info store-no-tokens", "store.json "),
    ("info store-no-checksums", "store.json "),
    ("info store-cut", "tokens.bin "),
    ("info store-long", "tokens.bin has 112 "),
    ("info store-flipped --verify", "tokens.bin: bytes 0 to 107"),
    ("pack store --length 16", "pack: .*info STORE --length N"),
    ("inspect store --length 16", "inspect: .*info STORE --length N"),
    ("info store --length 0", "1; got 0"),
    ("info store --length -4", "1; got -4"),
    ("info store --length ten", "--length: .*'ten'"),
    ("info store --length 1000000000", "1,000,000,000"),
    ("info store --length 64k", "64,000"),
    ("info store --length 999999999999999999999999", "999999999999999999999999"),
    ("info store --length 16 --shards 0", "shards"),
    ("info store --length 16 --shards 17", "17"),
    ("info store --length 16 --rows 0", "rows"),
    ("info store --length 16 --kv-heads 0", "kv_heads"),
    ("info store --length 16 --packing none", "--packing"),
]


@pytest.mark.parametrize(
    ("line", "message"), COMMANDS, ids=[f"{i} {line}"[:60] for i, (line, _) in enumerate(COMMANDS)]
)
def test_commands_print_one_line_of_error(folder, monkeypatch, line, message):
    monkeypatch.chdir(folder)
    assert re.search(message, refusal(main, line.split()))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["info", ""], r"\. "),
        (["info", "a\nb"], "a b "),
        (["info", "line\nbreak"], "line break "),
        (["info", "a\0b"], r"a\\x00b "),
        (["info", "\x1b[31mred"], r"\\x1b\[31mred "),
        (["info", "x" * 5000], "File name too long"),
        (["prepare", "text.txt", "-o", "x" * 300], "File name too long"),
        (["prepare", "a\0b", "-o", "out"], r"a\\x00b"),
        (["prepare", "text.txt", "-o", "a\0b"], r"a\\x00b"),
        (["prepare", "", "-o", "folder/out"], "output folder/out"),
        (["prepare", "text.txt", "-o", ""], r"output \. "),
        (["prepare", "text.txt", "-o", "out", "--tokenizer", ""], "tokenizer.json"),
        (["info", "store", "--length", ""], "--length.*''"),
        (["info", "store", "--length", "٣"], "--length"),
        (["info", "store", "--length", "9" * 5000], "--length"),
    ],
    ids=range(15),
)
def test_odd_arguments_print_one_line_of_error(folder, monkeypatch, argv, message):
    monkeypatch.chdir(folder)
    assert re.search(message, refusal(main, argv))


# -- from Python ------------------------------------------------------------------------------------------------------


def store_of(*lengths, **vocabulary):
    ends = np.cumsum([0, *lengths])
    numbers = Vocabulary("numbers", **vocabulary)
    return TokenStore("numbered", [np.arange(ends[-1])], ends[:-1], ends[1:], numbers, "content")


def rows(store=None, **changed):
    settings = {"layout": SequenceLayout.contiguous(4, 1), "shard": 0, "rows_per_batch": 1}
    return PackedSequences(store_of(8) if store is None else store, **settings | changed)


BYTES = ByteTokenizer()
CALLS = {
    "no documents": (lambda _: TokenStore.of([], BYTES), "documents: "),
    "empty documents": (lambda _: TokenStore.of([Document("a", b"")], BYTES), "documents: "),
    "documents that end before they start": (lambda _: store_of(3, -1), "document 1 of 2 ends at token 2"),
    "split in nothing": (lambda _: store_of(3).split(0.0), "validation_fraction=0.0"),
    "split in all": (lambda _: store_of(3).split(1.0), "validation_fraction=1.0"),
    "split in nan": (lambda _: store_of(3).split(float("nan")), "validation_fraction=nan"),
    "split one token": (lambda _: store_of(1).split(0.5), "numbered has 1 tokens"),
    "no stores": (lambda _: rows([]), "no stores"),
    "an empty store": (lambda _: rows(store_of(0)), "numbered "),
    "other tokenizers": (lambda _: rows([store_of(8), TokenStore.of([Document("a", b"a")], BYTES)]), "one tokenizer"),
    "a shard too many": (lambda _: rows(shard=1), "shard 1 "),
    "a shard below 0": (lambda _: rows(shard=-1), "shard -1 "),
    "no rows": (lambda _: rows(rows_per_batch=0), "rows_per_batch must be at least 1; got 0"),
    "a replica too many": (lambda _: rows(replica=1), "replica 1 "),
    "no replicas": (lambda _: rows(replicas=0), "replicas must be at least 1; got 0"),
    "ahead below 0": (lambda _: rows(ahead=-1), "ahead must be at least 0; got -1"),
    "weights of 0": (lambda _: rows(weights=[0]), "weights [0]"),
    "weights of nan": (lambda _: rows(weights=[float("nan")]), "weights [nan]"),
    "weights too many": (lambda _: rows(weights=[1, 2]), "weights [1, 2]"),
    "a packing without a name": (lambda _: rows(packing=lambda *_: None), "packing "),
    "a step below 0": (lambda _: rows().batch(-1), "step must be at least 0; got -1"),
    "a state of other rows": (lambda _: rows().load_state_dict({}), "version None"),
    "a state without rows": (
        lambda _: rows().load_state_dict({**rows().state_dict(), "rows": "x"}),
        "rows='x'",
    ),
    **{
        f"a state with rows {value}": (
            lambda _, value=value: rows().load_state_dict({**rows().state_dict(), "rows": value}),
            f"rows={value}",
        )
        for value in (True, -1, 2.0, None, 10**18)
    },
    "a token beyond the vocabulary": (
        lambda _: rows(store_of(5, 8, size=9)).batch(2),
        "is 9, outside of the vocabulary of 9",
    ),
    "a token below 0": (
        lambda _: TokenStore("n", [np.array([1, -7])], np.array([0]), np.array([2]), Vocabulary(size=9), "c").read(
            0, 0, 2
        ),
        "n: token 1 of document 0 (token 1 of the store) is -7, outside of the vocabulary of 9",
    ),
    "a flipped token in a file": (
        lambda root: open_store(root / "store-flipped").read(2, 1, 6, 2),
        "store-flipped: token 3 of document 2 (token 15 of the store) is 16492, outside of the vocabulary of 257",
    ),
    "a store of another tokenizer": (
        lambda root: open_store(root / "store", train(root)),
        "store has tokens of tokenizer bytes",
    ),
    "a store that is not there": (lambda root: open_store(root / "none"), "none does not exist"),
    "documents that are not there": (lambda root: read_documents(root / "none"), "none "),
    "documents in an empty folder": (lambda root: read_documents(root / "folder"), "folder "),
    "a tokenizer of noise": (lambda _: TextTokenizer(b"\0\1"), "tokenizer.json"),
    "a tokenizer with odd tokens": (
        lambda _: TextTokenizer(b'{"model": {"vocab": {}}, "added_tokens": [3]}'),
        "added tokens",
    ),
    "a tokenizer of brackets": (lambda _: TextTokenizer(b"[" * 100_000), "tokenizer.json"),
    "tokens that are no bytes": (lambda _: BYTES.decode(SequenceLayout.contiguous(300, 1).positions(0)), "token 257"),
    "preparation of nothing": (lambda root: prepare(Preparation([], root / "out"), 1), "no inputs"),
    "preparation in no pieces": (
        lambda root: prepare(Preparation([root / "text.txt"], root / "out", chunk_bytes=0), 1),
        "got 0",
    ),
}


def train(root: Path) -> TextTokenizer:
    from armillary.data.text.tokenizer import train_bpe

    return train_bpe(iter(["some words"]), 260)


@pytest.mark.parametrize("name", CALLS)
def test_calls_raise_value_error_with_the_argument(folder, name):
    call, messages = CALLS[name]
    with pytest.raises(ValueError) as error:
        call(folder)
    assert messages in str(error.value)
    assert "\n" not in str(error.value)
