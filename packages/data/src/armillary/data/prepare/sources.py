"""Input of a preparation: `chunks` cuts files into chunks, `documents` reads the documents of one chunk.

Worker processes read chunks independently of each other. The chunks and their order depend only on the input.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import get_args

from armillary.core.files import file_size, open_file
from armillary.data.formats.arrow import is_single_dataset
from armillary.data.prepare.chunking import Format, cut_text, cutter_of
from armillary.data.prepare.readers import File, InputChunk, Invalid
from armillary.data.text.corpus import Document, binary, is_visible, walk

SNIFFED_BYTES = 2**20
"""Bytes at the beginning of a file that are read to decide if it is text."""
_ACCEPTED = "give a file of text, JSONL or Parquet, or a folder with such files in it"


def chunks(
    inputs: Sequence[Path], *, format: Format = "auto", text_field: str = "text", size: int = 8 << 20
) -> list[InputChunk]:
    """Cuts the input into chunks of about `size` bytes of text each, in order.

    An input is a file or a folder. A folder contributes its files at any depth, sorted by name, except hidden files,
    empty files and files in hidden or linked folders. With format "auto" the suffix of a file selects its format:

    - .jsonl and .ndjson: one JSON object per line. A chunk is a range of bytes, and contains the lines that start in
      this range. A compressed file (.jsonl.gz) is one chunk.
    - .parquet: a chunk is a range of row groups.
    - other suffixes: text, one document per file. Small files share a chunk; a large file is one chunk. A binary file
      in a folder is left out; a binary file that is an input itself is refused, unless the format is "text".

    A folder written by `datasets.Dataset.save_to_disk` is cut into ranges of rows. Names of documents are relative to
    their input, so documents of two inputs may have equal names.

    Args:
        format: "auto", or the format of all files, whatever their suffixes; the files of a saved dataset are then read
            in this format too. "trees" is JSONL with a tree per line (`tree_records`).
        text_field: field of JSONL objects, or column of a table, with the text of a document.

    Raises:
        ValueError: a path that does not exist, cannot be read or has no text; an input that is a binary file; a column
            that is missing or has no strings; a file that is in two inputs; a .zst file; a saved dataset with several
            splits, or in a folder of an input.
        ImportError: the package that reads Parquet or saved datasets is not installed.
    """
    if not inputs:
        raise ValueError(f"there are no inputs; {_ACCEPTED}")
    if format not in get_args(Format):
        raise ValueError(f"format={format!r} is not one of {', '.join(map(repr, get_args(Format)))}")
    if size < 1:
        raise ValueError(f"size must be at least 1 byte; got {size}")
    files_of_inputs = [_files(path, format) for path in inputs]
    _check_unique(files_of_inputs)
    files = (file for group in files_of_inputs for file in group)
    field, input_chunks = None if format == "trees" else text_field, list[InputChunk]()
    # `groupby` without sorting: only consecutive files share a chunk, so that documents stay in the order of the files.
    for cutter, group in groupby(files, key=lambda file: cutter_of(file, format)):
        input_chunks += cutter(list(group), field, size)
    if not input_chunks:
        raise ValueError(f"{', '.join(map(str, inputs))} holds no text; {_ACCEPTED}")
    return input_chunks


def documents(chunk: InputChunk) -> Iterator[Document | Invalid]:
    """Reads the documents of a chunk in order, named like `a.txt`, `a.jsonl:byte 1234` or `a.parquet:row 17`.

    Yields `Invalid` for a record or file that is not a document: JSON that does not parse, a field that is missing or
    no string, an invalid tree, a binary file in a folder. Documents may be empty.

    Raises:
        ValueError: a file cannot be read.
    """
    try:
        yield from chunk.read(chunk)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise _unreadable(chunk.path, error) from error


def fingerprint(chunks: Sequence[InputChunk]) -> str:
    """Returns a hash of the names, sizes and modification times of all files, and of the chunks: 64 hex digits.

    Raises:
        ValueError: a file cannot be found.
    """
    digest = hashlib.sha256()
    for chunk in chunks:
        try:
            stamps = [(file.name, _stamps(file.path)) for file in chunk.files]
        except OSError as error:
            raise _unreadable(chunk.path, error) from error
        digest.update(repr((chunk.read.__name__, chunk.start, chunk.stop, chunk.text_field, stamps)).encode())
    return digest.hexdigest()


def _files(path: Path, format: Format) -> list[File]:
    """Returns the files of one input, without empty files. A saved dataset counts as one file."""
    try:
        if not path.is_dir():
            files = [_file(path, path.name, chosen=True)]
            _check_text(files[0], format)
        elif format == "auto" and is_single_dataset(path):
            files = [File(path, path.resolve().name, sum(size for _, size, _ in _stamps(path)), chosen=True)]
        else:
            paths = walk(path, is_visible)
            files = [_file(file, file.relative_to(path).as_posix(), chosen=False) for file in paths]
            files.sort(key=lambda file: file.name)
            for file in files if format == "auto" else ():
                # Otherwise each Arrow file of a saved dataset in a subfolder would be read as text.
                if file.path.name in ("state.json", "dataset_dict.json") and is_single_dataset(file.path.parent):
                    folder = file.path.parent
                    raise ValueError(f"{path} has a saved dataset in it; give it as an input of its own: {folder}")
    except OSError as error:
        raise _unreadable(path, error) from error
    files = [file for file in files if file.bytes]
    if not files:
        raise ValueError(f"{path} holds no text; {_ACCEPTED}")
    return files


def _file(path: Path, name: str, *, chosen: bool) -> File:
    """Returns a file, after checking that it can be read: the run that reads it may be hours later."""
    return File(path, name, file_size(path), chosen)


def _check_text(file: File, format: Format) -> None:
    """Raises ValueError for a binary file that the user named itself, unless the user has also given its format."""
    if format == "auto" and cutter_of(file, format) is cut_text:
        with open_file(file.path) as text_file:
            reason = binary(text_file.read(SNIFFED_BYTES))
        if reason is not None:
            raise ValueError(f"{file.path} is no text: {reason}; {_ACCEPTED}, or take it as it is with --format text")


def _check_unique(files_of_inputs: Sequence[Sequence[File]]) -> None:
    """Raises ValueError if two inputs contain the same file."""
    # Files are compared by device and inode, so that a link and its target count as the same file. Within one input a
    # file may occur twice, because of links.
    first_inputs: dict[tuple[int, int], tuple[int, Path]] = {}
    for index, files in enumerate(files_of_inputs):
        for file in files:
            stat = file.path.stat()
            first_index, path = first_inputs.setdefault((stat.st_dev, stat.st_ino), (index, file.path))
            if first_index != index:
                raise ValueError(f"{file.path} is given twice, first as {path}; give each file once")


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Returns name, size and modification time (ns) of a file, or of each file of a saved dataset."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]


def _unreadable(path: Path, error: Exception) -> ValueError:
    """Returns an error that names the unreadable file: the `filename` of `error` if it has one, else `path`."""
    file, reason = getattr(error, "filename", None) or path, getattr(error, "strerror", None) or error
    return ValueError(f"{file} cannot be read ({reason}); {_ACCEPTED}")
