"""Cutting files of each format into chunks, without reading their text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from armillary.data.formats.arrow import load_dataset
from armillary.data.optional import optional
from armillary.data.prepare.readers import (
    File,
    InputChunk,
    read_dataset,
    read_gzip_jsonl,
    read_jsonl,
    read_parquet,
    read_text,
)

Format = Literal["auto", "text", "jsonl", "parquet", "trees"]
Cutter = Callable[[Sequence[File], str | None, int], Iterable[InputChunk]]
"""(files of one format, field with the text or None for trees, chunk size in bytes) -> chunks of about that size."""


def cutter_of(file: File, format: Format) -> Cutter:
    """Returns the cutter for a file, chosen by its suffix if the format is "auto".

    Raises:
        ValueError: a .zst file, which cannot be decompressed here, unless the format is "text".
    """
    name = file.path.name.lower()
    if file.path.is_dir():
        return cut_dataset
    if name.endswith(".zst") and format != "text":
        raise ValueError(f"{file.path} is compressed with zstd; decompress it (zstd -d), or use gzip")
    if format == "parquet" or (format == "auto" and name.endswith(".parquet")):
        return cut_parquet
    if format in ("jsonl", "trees") or (format == "auto" and name.removesuffix(".gz").endswith((".jsonl", ".ndjson"))):
        return cut_gzip_jsonl if name.endswith(".gz") else cut_jsonl
    return cut_text


def cut_text(files: Sequence[File], field: str | None, size: int) -> Iterator[InputChunk]:
    """Packs consecutive files into chunks of at most `size` bytes; a larger file is one chunk."""
    for indices in _pack([file.bytes for file in files], size):
        members = tuple(files[indices.start : indices.stop])
        yield InputChunk(read_text, members, 0, len(members), sum(file.bytes for file in members), field)


def cut_jsonl(files: Sequence[File], field: str | None, size: int) -> Iterator[InputChunk]:
    """Cuts files into ranges of at most `size` bytes, which may begin inside a line: see `read_jsonl`."""
    for file in files:
        for start in range(0, file.bytes, size):
            stop = min(start + size, file.bytes)
            yield InputChunk(read_jsonl, (file,), start, stop, stop - start, field)


def cut_gzip_jsonl(files: Sequence[File], field: str | None, size: int) -> Iterator[InputChunk]:
    """Makes each file one chunk, because a gzip file can only be read from its beginning."""
    return (InputChunk(read_gzip_jsonl, (file,), 0, file.bytes, file.bytes, field) for file in files)


def cut_parquet(files: Sequence[File], field: str | None, size: int) -> Iterator[InputChunk]:
    """Packs consecutive row groups into chunks.

    Raises:
        ValueError: a file is not Parquet, or has no column of strings named `field`.
    """
    for file in files:
        try:
            parquet = optional("pyarrow.parquet", "parquet").ParquetFile(file.path)
        except ValueError as error:
            raise ValueError(f"{file.path} cannot be read as Parquet ({error})") from error
        with parquet:
            _check_column(file.path, field, parquet.schema_arrow)
            row_groups = [parquet.metadata.row_group(index) for index in range(parquet.metadata.num_row_groups)]
        if not any(group.num_rows for group in row_groups):
            continue
        # The size of a row group counts only the column with the text, because other columns are not read.
        sizes: list[int] = []
        for group in row_groups:
            columns = map(group.column, range(group.num_columns))
            sizes.append(sum(column.total_uncompressed_size for column in columns if column.path_in_schema == field))
        for indices in _pack(sizes, size):
            chunk_size = sum(sizes[indices.start : indices.stop])
            yield InputChunk(read_parquet, (file,), indices.start, indices.stop, chunk_size, field)


def cut_dataset(folders: Sequence[File], field: str | None, size: int) -> Iterator[InputChunk]:
    """Cuts saved datasets into ranges of rows, as if all rows had the same size.

    Raises:
        ValueError: a dataset has no column of strings named `field`.
    """
    for folder in folders:
        dataset = load_dataset(folder.path)
        _check_column(folder.path, field, dataset.data.schema)
        rows, total = len(dataset), dataset.data.column(field).nbytes
        step = max(1, rows * size // max(total, 1))  # rows per chunk, from the mean size of a row
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            # A proportional share of the bytes; the differences of rounded totals add up to `total`.
            chunk_bytes = total * stop // rows - total * start // rows
            yield InputChunk(read_dataset, (folder,), start, stop, chunk_bytes, field)


def _check_column(path: Path, field: str | None, schema: Any) -> None:
    """Raises ValueError unless an Arrow schema has a column `field` of strings."""
    types = optional("pyarrow", "parquet").types
    column_types = {name: schema.field(name).type for name in schema.names}
    # A dictionary-encoded column has the type of its values.
    values = {name: kind.value_type if types.is_dictionary(kind) else kind for name, kind in column_types.items()}
    text_columns = [name for name, kind in values.items() if str(kind) in ("string", "large_string", "string_view")]
    choices = f"its columns of strings are: {', '.join(text_columns) or 'none'}"
    if field not in column_types:
        raise ValueError(f"{path} has no column {field!r}; {choices}")
    if field not in text_columns:
        raise ValueError(f"{path}: column {field!r} is of type {column_types[field]}; {choices}")


def _pack(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Packs consecutive items into ranges with a total size of at most `limit`; a larger item is one range."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if total + size > limit and index > start:
            yield range(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))
