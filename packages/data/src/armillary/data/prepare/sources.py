"""Input of a preparation: `chunks` cuts files into chunks, `documents` reads the documents of one chunk."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

from armillary.core.internal import file_size, open_file, parse_json, read_file
from armillary.data.errors import optional, readable
from armillary.data.formats.foreign import is_single_dataset, load_dataset
from armillary.data.text.corpus import Document, binary, is_visible, json_records, walk

FORMATS = ("auto", "text", "jsonl", "parquet")
REMOVED = {
    "trees": "build trees of token sequences with `armillary.data.prefix_tree`, or save tokens and labels with "
    "`datasets`"
}
"""Formats of earlier releases, and what replaces them."""
SNIFFED_BYTES = 2**20
"""Bytes at the beginning of a file that are read to decide if it is text."""
ROWS = 64
"""Table rows per read: few, because each may be a long document."""
_ACCEPTED = "give a file of text, JSONL or Parquet, or a folder with such files in it"


@dataclass(frozen=True)
class Invalid:
    """A record or file that is no document, such as JSON that does not parse. The caller skips or refuses it.

    Args:
        binary: True for a binary file in a folder, which is always skipped.
        remedy: a correction that makes it a document.
    """

    name: str
    reason: str
    binary: bool = False
    remedy: str = "correct it"


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
    """A part of the input: one task of a worker process, which unpickles it.

    Args:
        read: reader of the file format, one of the functions below.
        files: one file, or several text files with one document each.
        start, stop: range of a single file: bytes of JSONL, row groups of Parquet, rows of a saved dataset.
        bytes: approximate size of the text; for a .gz file its compressed size.
        text_field: field or column with the text.
    """

    read: Callable[[InputChunk], Iterator[Document | Invalid]]
    files: tuple[File, ...]
    start: int
    stop: int
    bytes: int
    text_field: str

    @property
    def path(self) -> Path:
        """Path of the first file."""
        return self.files[0].path

    @property
    def name(self) -> str:
        """Name of the first file."""
        return self.files[0].name


def chunks(
    inputs: Sequence[Path],
    *,
    format: str = "auto",
    text_field: str = "text",
    size: int = 8 << 20,
    leave_out: Callable[[str, str], None] = lambda name, reason: None,
) -> list[InputChunk]:
    """Cuts files and folders into chunks of about `size` bytes of text each, in order.

    A folder contributes its files at any depth, sorted by name, except hidden files, empty files and files in hidden or
    linked folders. Names of documents are relative to their input.

    Args:
        format: "auto" (each file's suffix decides, and the content of a .json file), or the format of all files, those
            of a saved dataset too.
        text_field: field of JSON objects, or column of a table, with the text of a document.
        leave_out: called with the name of each file and folder in a folder that is not read, and the reason.

    Raises:
        ValueError: a path that does not exist, cannot be read or has no text; an input that is a binary file; a column
            that is missing or has no strings; a file that is in two inputs; a .zst file; a saved dataset with several
            splits, or in a folder of an input.
        ImportError: the package that reads Parquet or saved datasets is not installed.
    """
    if not inputs:
        raise ValueError(f"there are no inputs; {_ACCEPTED}")
    if format in REMOVED:
        raise ValueError(f"format={format!r} is no longer read: {REMOVED[format]}")
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is not one of {', '.join(map(repr, FORMATS))}")
    if size < 1:
        raise ValueError(f"size must be at least 1 byte; got {size}")
    # 1. The files of all inputs. Two inputs may not have the same file. Device and inode are compared, so that a link
    # and its target count as the same file. Within one input a file may occur twice, because of links.
    files, first_inputs = list[File](), dict[tuple[int, int], tuple[int, Path]]()
    for index, path in enumerate(inputs):
        for file in _files(path, format, leave_out):
            stat = file.path.stat()
            first_index, first_path = first_inputs.setdefault((stat.st_dev, stat.st_ino), (index, file.path))
            if first_index != index:
                raise ValueError(f"{file.path} is given twice, first as {first_path}; give each file once")
            files.append(file)
    # 2. Their chunks.
    input_chunks = list[InputChunk]()
    # `groupby` without sorting: only consecutive files share a chunk, so that documents stay in the order of the files.
    for cut, group in groupby(files, key=lambda file: _cutter_of(file, format)):
        input_chunks += cut(list(group), text_field, size)
    if not input_chunks:
        raise ValueError(f"{', '.join(map(str, inputs))} holds no text; {_ACCEPTED}")
    return input_chunks


def documents(chunk: InputChunk) -> Iterator[Document | Invalid]:
    """Yields the documents of a chunk in order, named like `a.txt`, `a.jsonl:byte 1234` or `a.parquet:row 17`.

    `name_by_line` replaces the byte of a name by the line, which takes a pass over the file. Documents may be empty.

    Raises:
        ValueError: a file cannot be read.
    """
    with readable(chunk.path, _ACCEPTED, (OSError, EOFError, ValueError, zlib.error)):
        yield from chunk.read(chunk)


def name_by_line(name: str, chunk: InputChunk) -> str:
    """Returns the name of a document of a chunk with the line in place of the byte, such as `a.jsonl:line 12`.

    Reads the file up to the document: a chunk that starts amid a file does not know its lines.
    """
    if chunk.read not in (read_jsonl, read_gzip_jsonl):
        return name
    file_name, _, byte = name.rpartition(":byte ")
    with open_file(chunk.path) as raw, gzip.open(raw, "rb") if chunk.read is read_gzip_jsonl else raw as file:
        remaining_bytes, lines = int(byte), 1
        while remaining_bytes and (block := cast(IO[bytes], file).read(min(remaining_bytes, 2**20))):
            lines, remaining_bytes = lines + block.count(b"\n"), remaining_bytes - len(block)
    return f"{file_name}:line {lines}"


def fingerprint(chunks: Sequence[InputChunk]) -> str:
    """Returns a hash of the names, sizes and modification times of all files, and of the chunks."""
    digest = hashlib.sha256()
    for chunk in chunks:
        with readable(chunk.path, _ACCEPTED):
            stamps = [(file.name, _stamps(file.path)) for file in chunk.files]
        # The names of readers are part of it: if one is renamed, earlier stores of the same input are not recognized.
        digest.update(repr((chunk.read.__name__, chunk.start, chunk.stop, chunk.text_field, stamps)).encode())
    return digest.hexdigest()


# -- files of an input ------------------------------------------------------------------------------------------------


def _files(path: Path, format: str, leave_out: Callable[[str, str], None]) -> list[File]:
    """Returns the files of one input, without empty files. A saved dataset counts as one file."""
    omissions: list[tuple[str, str]] = []
    with readable(path, _ACCEPTED):
        # `file_size` also checks that a file can be opened: the run that reads it may be hours later.
        if not path.is_dir():
            files = [File(path, path.name, file_size(path), chosen=True)]
            if format == "auto" and _cutter_of(files[0], format) is cut_text:
                with open_file(path) as text_file:
                    reason = binary(text_file.read(SNIFFED_BYTES))
                if reason is not None:
                    raise ValueError(
                        f"{path} is no text: {reason}; {_ACCEPTED}, or take it as it is with --format text"
                    )
        elif format == "auto" and is_single_dataset(path):
            files = [File(path, path.resolve().name, sum(size for _, size, _ in _stamps(path)), chosen=True)]
        else:
            paths = walk(path, is_visible, lambda x, why: omissions.append((x.relative_to(path).as_posix(), why)))
            files = [File(file, file.relative_to(path).as_posix(), file_size(file), chosen=False) for file in paths]
            files.sort(key=lambda file: file.name)
            for file in files if format == "auto" else ():
                # Otherwise each Arrow file of a saved dataset in a subfolder would be read as text.
                if file.path.name in ("state.json", "dataset_dict.json") and is_single_dataset(file.path.parent):
                    folder = file.path.parent
                    raise ValueError(f"{path} has a saved dataset in it; give it as an input of its own: {folder}")
    omissions += [(file.name, "it is empty") for file in files if not file.bytes]
    files = [file for file in files if file.bytes]
    for name, reason in sorted(omissions):
        leave_out(name, reason)
    if not files:
        first = f" ({omissions[0][0]} is left out, since {omissions[0][1]})" if omissions and path.is_dir() else ""
        raise ValueError(f"{path} holds no text{first}; {_ACCEPTED}")
    return files


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Returns name, size and modification time (ns) of a file, or of each file of a saved dataset."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]


# -- formats: a function that cuts files of the format into chunks, and one that reads a chunk -------------------------


def _cutter_of(file: File, format: str) -> Callable[[Sequence[File], str, int], Iterator[InputChunk]]:
    """Returns the function that cuts a file into chunks. Raises ValueError for a .zst file, unless taken as text."""
    name = file.path.name.lower()
    if file.path.is_dir():
        return cut_dataset
    if name.endswith(".zst") and format != "text":
        raise ValueError(f"{file.path} is compressed with zstd; decompress it (zstd -d), or use gzip")
    if format == "parquet" or (format == "auto" and name.endswith(".parquet")):
        return cut_parquet
    if format == "jsonl" or (format == "auto" and name.removesuffix(".gz").endswith((".jsonl", ".ndjson"))):
        return cut_jsonl
    if format == "auto" and name.endswith(".json"):
        with readable(file.path, _ACCEPTED), open_file(file.path) as json_file:
            records = json_records(json_file.read(SNIFFED_BYTES))
        return {"array": cut_json, "lines": cut_jsonl, None: cut_text}[records]
    return cut_text


def cut_text(files: Sequence[File], field: str, size: int) -> Iterator[InputChunk]:
    for indices in _pack([file.bytes for file in files], size):
        members = tuple(files[indices.start : indices.stop])
        yield InputChunk(read_text, members, 0, len(members), sum(file.bytes for file in members), field)


def read_text(chunk: InputChunk) -> Iterator[Document | Invalid]:
    for file in chunk.files:
        text = read_file(file.path, None)
        if not file.chosen and (reason := binary(text)) is not None:
            yield Invalid(file.name, f"taken as binary, since {reason}", binary=True)
        else:
            yield Document(file.name, text)


def cut_jsonl(files: Sequence[File], field: str, size: int) -> Iterator[InputChunk]:
    # Ranges may begin inside a line: `read_jsonl` reads the lines that begin in its range.
    for file in files:
        if file.path.name.lower().endswith(".gz"):  # can only be read from its beginning
            yield InputChunk(read_gzip_jsonl, (file,), 0, file.bytes, file.bytes, field)
            continue
        for start in range(0, file.bytes, size):
            stop = min(start + size, file.bytes)
            yield InputChunk(read_jsonl, (file,), start, stop, stop - start, field)


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


def _read_lines(file: IO[bytes], chunk: InputChunk, start: int, stop: int | None) -> Iterator[Document | Invalid]:
    """Reads the lines that begin from byte `start`, where `file` is, and before byte `stop`."""
    while (stop is None or start < stop) and (line := file.readline()):
        if line.strip():
            name = f"{chunk.name}:byte {start}"
            try:
                record = parse_json(line)
            except ValueError as error:
                yield Invalid(name, str(error))
            else:
                yield _document(name, record, chunk.text_field)
        start += len(line)


def _document(name: str, record: object, field: str) -> Document | Invalid:
    """Returns the document in a record of JSON."""
    if not isinstance(record, dict):
        return Invalid(name, f"it must be a JSON object, not {_kind(record)}")
    fields = cast(dict[str, Any], record)
    if field not in fields:
        reason = f"there is no field {field!r}; the fields are {', '.join(map(repr, fields)) or 'none'}"
        strings = {key: len(value) for key, value in fields.items() if isinstance(value, str)}
        if not strings:
            return Invalid(name, reason)
        longest = max(strings, key=strings.__getitem__)  # most likely the text
        return Invalid(name, reason, remedy=f"give the field of the text, such as --text-field {longest}")
    text = fields[field]
    if not isinstance(text, str):
        return Invalid(name, f"field {field!r} is {_kind(text)}; give a string")
    try:
        return Document(name, text.encode())
    except UnicodeEncodeError as error:  # half of a surrogate pair, the escape \ud800
        return Invalid(name, str(error))


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def cut_json(files: Sequence[File], field: str, size: int) -> Iterator[InputChunk]:
    # An array can only be parsed from its beginning.
    return (InputChunk(read_json, (file,), 0, file.bytes, file.bytes, field) for file in files)


def read_json(chunk: InputChunk) -> Iterator[Document | Invalid]:
    """Reads the records of a JSON array, named by their index. Takes memory for the whole file."""
    for index, record in enumerate(parse_json(read_file(chunk.path, None))):
        yield _document(f"{chunk.name}:record {index}", record, chunk.text_field)


def cut_parquet(files: Sequence[File], field: str, size: int) -> Iterator[InputChunk]:
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


def read_parquet(chunk: InputChunk) -> Iterator[Document | Invalid]:
    with optional("pyarrow.parquet", "parquet").ParquetFile(chunk.path) as file:
        # Names of documents count rows from the beginning of the file, not of the chunk.
        first_row = sum(file.metadata.row_group(group).num_rows for group in range(chunk.start))
        groups = range(chunk.start, chunk.stop)
        batches = file.iter_batches(ROWS, row_groups=groups, columns=[chunk.text_field])
        yield from _read_columns(chunk.name, first_row, (batch.column(0) for batch in batches))


def cut_dataset(folders: Sequence[File], field: str, size: int) -> Iterator[InputChunk]:
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


def read_dataset(chunk: InputChunk) -> Iterator[Document | Invalid]:
    dataset = load_dataset(chunk.path).with_format("arrow")
    starts = range(chunk.start, chunk.stop, ROWS)
    tables = (dataset[start : min(start + ROWS, chunk.stop)] for start in starts)
    yield from _read_columns(chunk.name, chunk.start, (table.column(chunk.text_field) for table in tables))


def _check_column(path: Path, field: str, schema: Any) -> None:
    """Raises ValueError unless an Arrow schema has a column `field` of strings."""
    types = optional("pyarrow", "parquet").types
    column_types = {name: schema.field(name).type for name in schema.names}
    # A dictionary-encoded column has the type of its values.
    values = {name: kind.value_type if types.is_dictionary(kind) else kind for name, kind in column_types.items()}
    text_columns = [name for name, kind in values.items() if str(kind) in ("string", "large_string", "string_view")]
    choices = f"its columns of strings (--text-field) are: {', '.join(text_columns) or 'none'}"
    if field not in column_types:
        raise ValueError(f"{path} has no column {field!r}; {choices}")
    if field not in text_columns:
        raise ValueError(f"{path}: column {field!r} is of type {column_types[field]}; {choices}")


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
