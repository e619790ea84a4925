"""How each kind of file is cut into chunks, without reading its text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from armillary.data.formats.arrow import load_rows
from armillary.data.optional import optional
from armillary.data.prepare.readers import (
    File,
    InputChunk,
    is_text,
    read_dataset,
    read_jsonl,
    read_packed_jsonl,
    read_parquet,
    read_text,
)

Format = Literal["auto", "text", "jsonl", "parquet", "trees"]
Cut = Callable[[Sequence[File], str | None, int], Iterable[InputChunk]]
"""From files of one kind, the field of their text (None: lines are trees) and a size, to chunks that hold about so many
bytes of text."""


def way_to_cut(file: File, format: Format) -> Cut:
    """What cuts the file, by its suffix where the format is "auto".

    Raises:
        ValueError: a .zst file, which nothing here unpacks.
    """
    name = file.path.name.lower()
    if file.path.is_dir():
        return cut_dataset
    if name.endswith(".zst") and format != "text":
        raise ValueError(f"{file.path} is packed with zstd; unpack it (zstd -d), or pack it with gzip")
    if format == "parquet" or (format == "auto" and name.endswith(".parquet")):
        return cut_parquet
    if format in ("jsonl", "trees") or (format == "auto" and name.removesuffix(".gz").endswith((".jsonl", ".ndjson"))):
        return cut_packed_jsonl if name.endswith(".gz") else cut_jsonl
    return cut_text


def cut_text(files: Sequence[File], field: str | None, size: int) -> Iterator[InputChunk]:
    """Neighbours share a chunk as long as they fit into it."""
    for group in _groups([file.bytes for file in files], size):
        together = tuple(files[group.start : group.stop])
        yield InputChunk(read_text, together, 0, len(together), sum(file.bytes for file in together), field)


def cut_jsonl(files: Sequence[File], field: str | None, size: int) -> Iterator[InputChunk]:
    """Ranges of bytes, cut anywhere."""
    for file in files:
        for start in range(0, file.bytes, size):
            stop = min(start + size, file.bytes)
            yield InputChunk(read_jsonl, (file,), start, stop, stop - start, field)


def cut_packed_jsonl(files: Sequence[File], field: str | None, size: int) -> Iterator[InputChunk]:
    """Whole, since a packed file can only be read from its beginning."""
    return (InputChunk(read_packed_jsonl, (file,), 0, file.bytes, file.bytes, field) for file in files)


def cut_parquet(files: Sequence[File], field: str | None, size: int) -> Iterator[InputChunk]:
    """Row groups, as many as fit.

    Raises:
        ValueError: a file that is not Parquet, or has no such column of strings.
    """
    return chain.from_iterable(_cut_parquet(file, field, size) for file in files)


def cut_dataset(folders: Sequence[File], field: str | None, size: int) -> Iterator[InputChunk]:
    """Rows, as if all were of the same size.

    Raises:
        ValueError: a folder that has no such column of strings.
    """
    return chain.from_iterable(_cut_dataset(folder, field, size) for folder in folders)


def _cut_parquet(file: File, field: str | None, size: int) -> Iterator[InputChunk]:
    try:
        parquet = optional("pyarrow.parquet", "parquet").ParquetFile(file.path)
    except ValueError as error:
        raise ValueError(f"{file.path} cannot be read as Parquet ({error})") from error
    with parquet:
        _check_column(file.path, field, parquet.schema_arrow)
        groups = [parquet.metadata.row_group(index) for index in range(parquet.metadata.num_row_groups)]
    sizes = [_bytes_of(group, field) for group in groups]
    for part in _groups(sizes, size) if any(group.num_rows for group in groups) else ():
        yield InputChunk(read_parquet, (file,), part.start, part.stop, sum(sizes[part.start : part.stop]), field)


def _bytes_of(group: Any, field: str | None) -> int:
    columns = (group.column(index) for index in range(group.num_columns))
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == field)


def _cut_dataset(folder: File, field: str | None, size: int) -> Iterator[InputChunk]:
    dataset = load_rows(folder.path)
    _check_column(folder.path, field, dataset.data.schema)
    rows, total = len(dataset), dataset.data.column(field).nbytes
    step = max(1, rows * size // max(total, 1))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield InputChunk(read_dataset, (folder,), start, stop, total * stop // rows - total * start // rows, field)


def _check_column(path: Path, field: str | None, schema: Any) -> None:
    columns = ", ".join(name for name in schema.names if is_text(schema.field(name).type)) or "none"
    if field not in schema.names:
        raise ValueError(f"{path} has no column {field!r}; its columns of strings are: {columns}")
    if not is_text(kind := schema.field(field).type):
        raise ValueError(f"{path}: column {field!r} is of type {kind}; its columns of strings are: {columns}")


def _groups(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Ranges of neighbours whose sizes add up to `limit` at most; an item that is larger is alone."""
    start, held = 0, 0
    for index, size in enumerate(sizes):
        if held + size > limit and index > start:
            yield range(start, index)
            start, held = index, 0
        held += size
    if start < len(sizes):
        yield range(start, len(sizes))
