"""The documents of one chunk of the input: a reader for each kind of file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from armillary.data.formats.arrow import load_rows
from armillary.data.optional import optional
from armillary.data.prepare.tree_records import tree_record
from armillary.data.text.corpus import Document, binary

ROWS = 64
"""Rows read at a time: few, since each may be a long document."""


@dataclass(frozen=True)
class Invalid:
    """A record that gives no document, and why. Whether to pass over it or to stop is the caller's choice.

    Args:
        binary: it is a file of a folder that was taken as a whole, and is not text: nobody meant it.
    """

    name: str
    reason: str
    binary: bool = False


@dataclass(frozen=True)
class File:
    """A file of the input, or the folder of a saved dataset.

    Args:
        name: what its documents are named after.
        bytes: its size on disk.
        chosen: the user named this very file, not a folder around it; `chunks` has looked at it, or was told that it
            is text whatever it holds.
    """

    path: Path
    name: str
    bytes: int
    chosen: bool


@dataclass(frozen=True)
class InputChunk:
    """A part of the input that one process reads on its own. It can be pickled.

    Args:
        read: how to read it: one of the functions below.
        files: one file, or several text files of which each is a document.
        start, stop: which part of a single file: bytes of JSONL, row groups of Parquet, rows of a saved dataset.
        bytes: about how much text it holds; of a .gz file, its packed size.
        text_field: the field of a record that is the document; None: lines are trees.
    """

    read: Callable[[InputChunk], Iterator[Document | Invalid]]
    files: tuple[File, ...]
    start: int
    stop: int
    bytes: int
    text_field: str | None

    @property
    def path(self) -> Path:
        """Of the first file."""
        return self.files[0].path

    @property
    def name(self) -> str:
        """Of the first file."""
        return self.files[0].name


def read_text(chunk: InputChunk) -> Iterator[Document | Invalid]:
    """Each file is a document, its bytes as they are."""
    for file in chunk.files:
        text = file.path.read_bytes()
        if not file.chosen and (reason := binary(text)) is not None:
            yield Invalid(file.name, f"taken as binary, since {reason}", binary=True)
        else:
            yield Document(file.name, text)


def read_jsonl(chunk: InputChunk) -> Iterator[Document | Invalid]:
    """The lines that start in the chunk, so that each line of the file is in exactly one of its chunks."""
    with chunk.path.open("rb") as file:
        if chunk.start:
            # A line starts after a line break. No more is read than could hold one, however long the line is.
            file.seek(chunk.start - 1)
            if not file.readline(chunk.stop - chunk.start).endswith(b"\n"):
                return
        yield from _records(file, chunk, file.tell(), chunk.stop)


def read_packed_jsonl(chunk: InputChunk) -> Iterator[Document | Invalid]:
    """All lines of a .gz file. Bytes are counted as unpacked."""
    with gzip.open(chunk.path, "rb") as file:
        yield from _records(cast(IO[bytes], file), chunk, 0, None)


def read_parquet(chunk: InputChunk) -> Iterator[Document | Invalid]:
    """The rows of some row groups, counted over the whole file."""
    with optional("pyarrow.parquet", "parquet").ParquetFile(chunk.path) as file:
        first = sum(file.metadata.row_group(group).num_rows for group in range(chunk.start))
        groups = range(chunk.start, chunk.stop)
        batches = file.iter_batches(ROWS, row_groups=groups, columns=[chunk.text_field])
        yield from _rows(chunk.name, first, (batch.column(0) for batch in batches))


def read_dataset(chunk: InputChunk) -> Iterator[Document | Invalid]:
    """Some rows of a folder that `datasets.Dataset.save_to_disk` wrote."""
    dataset = load_rows(chunk.path).with_format("arrow")
    starts = range(chunk.start, chunk.stop, ROWS)
    tables = (dataset[start : min(start + ROWS, chunk.stop)] for start in starts)
    yield from _rows(chunk.name, chunk.start, (table.column(chunk.text_field) for table in tables))


def is_text(kind: Any) -> bool:
    """Whether a column of this Arrow type holds strings."""
    values = kind.value_type if optional("pyarrow", "parquet").types.is_dictionary(kind) else kind
    return str(values) in ("string", "large_string", "string_view")


def _records(file: IO[bytes], chunk: InputChunk, start: int, stop: int | None) -> Iterator[Document | Invalid]:
    """The record of each line from `start` on, which is where the file stands; none from a line at `stop` or later."""
    while (stop is None or start < stop) and (line := file.readline()):
        if line.strip():
            yield _record(f"{chunk.name}:byte {start}", line, chunk.text_field)
        start += len(line)


def _record(name: str, line: bytes, field: str | None) -> Document | Invalid:
    try:
        # Decoded here, since `json.loads` would guess at encodings. An editor may have put a mark of UTF-8 in front.
        record: object = json.loads(line.decode("utf-8-sig"))
        if field is None:
            return tree_record(name, record)
        text = _field(record, field)
        # An escape such as \ud800 is half of a character, which no UTF-8 can hold: encoding it fails, as it should.
        return Document(name, text.encode())
    except (ValueError, RecursionError) as error:
        return Invalid(name, str(error))


def _field(record: object, field: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"the line is a {type(record).__name__}; give an object with a field {field!r}")
    fields = cast(dict[str, object], record)
    if field not in fields:
        hint = " (trees are read with --format trees)" if {"completions", "children"} & {*fields} else ""
        raise ValueError(f"there is no field {field!r}; the fields are {', '.join(map(repr, fields)) or 'none'}{hint}")
    text = fields[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} is {'null' if text is None else type(text).__name__}; give a string")
    return text


def _rows(name: str, first: int, columns: Iterable[Any]) -> Iterator[Document | Invalid]:
    """A document for each string of some Arrow columns, named by its row; their bytes as they are."""
    arrow = optional("pyarrow", "parquet")
    # As bytes, since Arrow doesn't check that its strings are UTF-8, and nothing here needs them decoded.
    texts = (text for column in columns for text in column.cast(arrow.large_string()).cast(arrow.large_binary()))
    for row, text in enumerate(texts, start=first):
        if text.is_valid:
            yield Document(f"{name}:row {row}", text.as_py())
        else:
            yield Invalid(f"{name}:row {row}", "the text is null")
