"""External files: nested more deeply than Python's recursion limit, pipes, huge, or JSON of another type.

Each reader raises a one-line error. `tests/test_structure.py` finds code that does not use `armillary.core.files`.
"""

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from armillary.core.internal import read_json
from armillary.data import TextTokenizer, open_store, read_documents
from armillary.data.formats.foreign import is_single_dataset
from armillary.data.formats.store_folder import Header, map_file
from armillary.data.prepare.sources import chunks
from armillary.data.text.tokenizer import read_name
from armillary.models.internal import ends_of_text, open_tensors
from armillary.train.checkpoint.tensors_and_manifest import Damaged, FileRecord, SavedTensors, file_fault, read_checked
from armillary.train.config.overlay import read_settings
from armillary.train.lock import Holder, heartbeat
from armillary.train.logs import cut_records, read_records

JSON, TOML = "[" * 100_000, "a = " + "[" * 100_000

JSON_READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": read_json,
    "run.json": read_settings,
    "generation_config.json": lambda path: ends_of_text(path.parent),
    "store.json": lambda path: Header.read(path.parent),
    "tokenizer.json": TextTokenizer.read,
    "tokenizer_config.json": lambda path: read_name(path, "eos_token"),
    "dataset_dict.json": lambda path: is_single_dataset(path.parent),
    "dataset/dataset_info.json": lambda path: open_store(path.parent),
    "manifest.json": read_checked,
}
"""Readers of files that contain a JSON object, by the file's name."""

READERS: dict[str, Callable[[Path], Any]] = {
    **JSON_READERS,
    "run.toml": read_settings,
    "text.txt": read_documents,
    "text.jsonl": lambda path: chunks([path]),
    "tokens.bin": lambda path: map_file(path, "u1"),
    "model.safetensors": lambda path: open_tensors(path, ExitStack()),
    "rank-0.safetensors": lambda path: SavedTensors(path.parent, [path.name]),
    "rank-1.safetensors": FileRecord.of_file,
    "metrics.jsonl": lambda path: list(read_records(path)),
    "cut.jsonl": lambda path: cut_records(path, 3),
    "1.held": Holder.read,
    "2.held": heartbeat,
}
"""Readers of all files that others may have written, by the file's name."""


def refusal(read: Callable[[Path], Any], path: Path) -> str:
    with pytest.raises((ValueError, OSError, Damaged)) as error:
        read(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_reader_refuses_nested_json_and_json_that_is_no_object(tmp_path):
    (tmp_path / "dataset").mkdir()
    for name, read in JSON_READERS.items():
        path = tmp_path / name
        for text, reason in {JSON: "nested too deeply", "null": "object, not null", "[1]": "object, not list"}.items():
            path.write_text(text)
            message = refusal(read, path)
            assert reason in message and (path.name in message or path.parent.name in message), name
        path.unlink()


def test_deeply_nested_lines_are_no_records_and_toml_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(JSON)
    assert list(read_records(tmp_path / "metrics.jsonl")) == []
    (tmp_path / "run.toml").write_text(TOML)
    assert "nested too deeply" in refusal(read_settings, tmp_path / "run.toml")


ABSENT = ("generation_config.json", "store.json", "dataset_dict.json", "dataset/dataset_info.json")
"""Files that count as absent if they are pipes, so that their readers may succeed."""


@pytest.fixture
def alarm():
    """Fails a test that waits for a pipe."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the reader waits for the pipe"))
    signal.alarm(60)
    yield
    signal.alarm(0)


def test_no_reader_waits_for_a_pipe(tmp_path, alarm):
    (tmp_path / "dataset").mkdir()
    for name, read in READERS.items():
        path = tmp_path / name
        os.mkfifo(path)
        if name in ABSENT:
            with suppress(ValueError):
                read(path)
        else:
            assert path.name in refusal(read, path), name
        path.unlink()


def test_a_huge_file_is_not_read(tmp_path):
    """A sparse file, which needs no disk space."""
    path = tmp_path / "manifest.json"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(Damaged, match="bytes"):
        read_checked(path)
    assert file_fault({path.name: FileRecord(7, 0)}, tmp_path) == f"file manifest.json has {2**40} of 7 bytes"
