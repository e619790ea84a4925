"""Readers of input chunks: a function for each file format, which yields the documents of an `InputChunk`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from armillary.core.files import open_file, read_file
from armillary.data.formats.arrow import load_dataset
from armillary.data.optional import optional
from armillary.data.prepare.tree_records import tree_record
from armillary.data.text.corpus import Document, binary

ROWS = 64
"""Table rows per read: few, because each may be a long document."""


@dataclass(frozen=True)
class Invalid:
    """A record or file that is not a document. The caller skips or refuses it.

    Args:
        name: name of the document that it would be.
        reason: why it is not a document.
        binary: True for a binary file in a folder, which is always skipped.
    """

    name: str
    reason: str
    binary: bool = False


@dataclass(frozen=True)
class File:
    """An input file, or the folder of a saved dataset.

    Args:
        name: prefix of the names of its documents.
        bytes: size on disk.
        chosen: True if the user named the file itself, and not a folder that contains it. Then it is read even if it
            seems to be binary.
    """

    path: Path
    name: str
    bytes: int
    chosen: bool


@dataclass(frozen=True)
class InputChunk:
    """A part of the input, small enough for one task of a worker process. Can be pickled.

    Args:
        read: reader of the file format, one of the functions below.
        files: one file, or several text files with one document each.
        start, stop: range of a single file: bytes of JSONL, row groups of Parquet, rows of a saved dataset.
        bytes: approximate size of the text; for a .gz file its compressed size.
        text_field: field or column with the text; None for JSONL of trees.
    """

    read: Callable[[InputChunk], Iterator[Document | Invalid]]
    files: tuple[File, ...]
    start: int
    stop: int
    bytes: int
    text_field: str | None

    @property
    def path(self) -> Path:
        """Path of the first file."""
        return self.files[0].path

    @property
    def name(self) -> str:
        """Name of the first file."""
        return self.files[0].name


# The names of these functions are part of `fingerprint`: if one is renamed, earlier preparations are not recognized.


def read_text(chunk: InputChunk) -> Iterator[Document | Invalid]:
    """Reads each text file as one document, in bytes."""
    for file in chunk.files:
        text = read_file(file.path, None)
        if not file.chosen and (reason := binary(text)) is not None:
            yield Invalid(file.name, f"taken as binary, since {reason}", binary=True)
        else:
            yield Document(file.name, text)


def read_jsonl(chunk: InputChunk) -> Iterator[Document | Invalid]:
    """Reads the lines that start in the chunk, so that each line belongs to exactly one chunk."""
    with open_file(chunk.path) as file:
        if chunk.start:
            # Skips the rest of a line that started in the previous chunk. Reading starts one byte before the chunk: if
            # this byte is a line break, a line starts with the chunk and nothing is skipped. Reading stops at the end
            # of the chunk: if there was no line break until then, no line starts in the chunk.
            file.seek(chunk.start - 1)
            if not file.readline(chunk.stop - chunk.start).endswith(b"\n"):
                return
        yield from _read_lines(file, chunk, file.tell(), chunk.stop)


def read_gzip_jsonl(chunk: InputChunk) -> Iterator[Document | Invalid]:
    """Reads all lines of a .gz file. The byte in a document's name counts uncompressed bytes."""
    with open_file(chunk.path) as compressed, gzip.open(compressed, "rb") as file:
        yield from _read_lines(cast(IO[bytes], file), chunk, 0, None)


def read_parquet(chunk: InputChunk) -> Iterator[Document | Invalid]:
    """Reads the rows of a range of row groups. The row in a document's name counts from the beginning of the file."""
    with optional("pyarrow.parquet", "parquet").ParquetFile(chunk.path) as file:
        first_row = sum(file.metadata.row_group(group).num_rows for group in range(chunk.start))
        groups = range(chunk.start, chunk.stop)
        batches = file.iter_batches(ROWS, row_groups=groups, columns=[chunk.text_field])
        yield from _read_columns(chunk.name, first_row, (batch.column(0) for batch in batches))


def read_dataset(chunk: InputChunk) -> Iterator[Document | Invalid]:
    """Reads a range of rows of a folder written by `datasets.Dataset.save_to_disk`."""
    dataset = load_dataset(chunk.path).with_format("arrow")
    starts = range(chunk.start, chunk.stop, ROWS)
    tables = (dataset[start : min(start + ROWS, chunk.stop)] for start in starts)
    yield from _read_columns(chunk.name, chunk.start, (table.column(chunk.text_field) for table in tables))


def _read_lines(file: IO[bytes], chunk: InputChunk, start: int, stop: int | None) -> Iterator[Document | Invalid]:
    """Reads the lines that start in bytes `start` to `stop - 1`, or up to the end of the file if `stop` is None.

    `file` is at byte `start`.
    """
    while (stop is None or start < stop) and (line := file.readline()):
        if line.strip():
            yield _parse_line(f"{chunk.name}:byte {start}", line, chunk.text_field)
        start += len(line)


def _parse_line(name: str, line: bytes, field: str | None) -> Document | Invalid:
    """Returns the document of a line of JSON: the text of its `field`, or without a field its tree."""
    try:
        # `json.loads` of bytes would guess the encoding. utf-8-sig drops the byte order mark that some editors write.
        record: object = json.loads(line.decode("utf-8-sig"))
        # `encode` raises for half of a surrogate pair (the escape \ud800): such a record is invalid too.
        return tree_record(name, record) if field is None else Document(name, _text_of(record, field).encode())
    except (ValueError, RecursionError) as error:
        return Invalid(name, str(error))


def _text_of(record: object, field: str) -> str:
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


def _read_columns(name: str, first: int, columns: Iterable[Any]) -> Iterator[Document | Invalid]:
    """Yields the strings of Arrow columns as documents, named by rows counted from `first`."""
    arrow = optional("pyarrow", "parquet")
    # As bytes: Arrow does not guarantee that strings are valid UTF-8, and `as_py` of a string raises if they are not.
    texts = (text for column in columns for text in column.cast(arrow.large_string()).cast(arrow.large_binary()))
    for row, text in enumerate(texts, start=first):
        if text.is_valid:
            yield Document(f"{name}:row {row}", text.as_py())
        else:
            yield Invalid(f"{name}:row {row}", "the text is null")
