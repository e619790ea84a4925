"""Documents from files, in chunks that processes read on their own, in an order that the input alone decides."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import get_args

from armillary.core.files import parse_json
from armillary.data.prepare.chunking import Format, cut_text, way_to_cut
from armillary.data.prepare.readers import File, InputChunk, Invalid
from armillary.data.text.corpus import Document, binary, is_visible, walk

LOOKED_AT = 2**20
"""Bytes of a file that is named by which it is taken for text."""
_ACCEPTED = "give a file of text, JSONL or Parquet, or a folder with such files in it"


def chunks(
    inputs: Sequence[Path], *, format: Format = "auto", text_field: str = "text", size: int = 8 << 20
) -> list[InputChunk]:
    """The input cut into chunks of about `size` bytes of text each, in order.

    Each input is a file or a folder; a folder stands for its files at any depth, sorted by name, with the same ones
    left out as in `read_documents`. The suffix of a file says what it is:

    - .jsonl and .ndjson: one object a line. A chunk is a range of bytes, and owns the lines that start in it.
      The same with .gz after it is one chunk.
    - .parquet: a chunk is some row groups.
    - anything else: text, and the file is one document. Small files share a chunk, a large one has its own. A binary
      file is left out of a folder, and refused where it is named itself, unless the format is "text".

    A folder that `datasets.Dataset.save_to_disk` wrote is cut by rows. Names of documents in a folder are relative to
    it, so they may repeat where several inputs are given.

    Args:
        format: what every file is, whatever its suffix; a saved dataset is then a folder like any other.
            "trees" are JSONL whose lines are trees (`tree_records`).
        text_field: the field of a JSONL object, or the column, that is the document.

    Raises:
        ValueError: a path does not exist, cannot be read, or holds no text; a column is missing or not of strings; a
            file is among two inputs; a .zst file; the splits of a saved dataset, of which one is to be chosen.
        ImportError: Parquet or a saved dataset, and the package that reads it is not installed.
    """
    _check(inputs, format, size)
    found = [_files(path, format) for path in inputs]
    _refuse_twice(found)
    ordered = (file for files in found for file in files)
    # Only neighbours share a chunk, so that documents come in the order of their names.
    runs = groupby(ordered, key=lambda file: way_to_cut(file, format))
    cut = [chunk for cut, files in runs for chunk in cut(list(files), None if format == "trees" else text_field, size)]
    if not cut:
        raise ValueError(f"{', '.join(map(str, inputs))} holds no text; {_ACCEPTED}")
    return cut


def documents(chunk: InputChunk) -> Iterator[Document | Invalid]:
    """The documents of a chunk in order, each named after its file, with `:byte 1234` or `:row 17` for a record.

    A record that gives no document is `Invalid`: JSON that does not parse, a field that is missing or null, a binary
    file in a folder. The text of a record may be empty.

    Raises:
        ValueError: a file that can no longer be read.
    """
    try:
        yield from chunk.read(chunk)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise _refusal(chunk.path, error) from error


def fingerprint(chunks: Sequence[InputChunk]) -> str:
    """64 hex digits that change when a file's name, size or time of change does, or the way it is cut.

    Raises:
        ValueError: a file that is no longer there.
    """
    digest = hashlib.sha256()
    for chunk in chunks:
        try:
            stamps = [(file.name, _stamps(file.path)) for file in chunk.files]
        except OSError as error:
            raise _refusal(chunk.path, error) from error
        digest.update(repr((chunk.read.__name__, chunk.start, chunk.stop, chunk.text_field, stamps)).encode())
    return digest.hexdigest()


def _check(inputs: Sequence[Path], format: str, size: int) -> None:
    if not inputs:
        raise ValueError(f"there are no inputs; {_ACCEPTED}")
    if format not in get_args(Format):
        raise ValueError(f"format={format!r} is not one of {', '.join(map(repr, get_args(Format)))}")
    if size < 1:
        raise ValueError(f"size must be at least 1 byte; got {size}")


def _files(path: Path, format: Format) -> list[File]:
    """The files of one input, without empty ones."""
    try:
        if not path.is_dir():
            files = [_file(path, path.name, chosen=True)]
            _refuse_binary(files[0], format)
        elif format == "auto" and _is_saved(path):
            files = [File(path, path.resolve().name, sum(size for _, size, _ in _stamps(path)), chosen=True)]
        else:
            found = (_file(file, file.relative_to(path).as_posix(), chosen=False) for file in walk(path, is_visible))
            files = sorted(found, key=lambda file: file.name)
            _refuse_saved(path, files, format)
    except OSError as error:
        raise _refusal(path, error) from error
    files = [file for file in files if file.bytes]
    if not files:
        raise ValueError(f"{path} holds no text; {_ACCEPTED}")
    return files


def _refuse_binary(file: File, format: Format) -> None:
    """Whoever names a picture as text has taken the wrong file; whoever says that it is text is believed."""
    if format == "auto" and way_to_cut(file, format) is cut_text:
        with file.path.open("rb") as opened:
            reason = binary(opened.read(LOOKED_AT))
        if reason is not None:
            raise ValueError(f"{file.path} is no text: {reason}; {_ACCEPTED}, or take it as it is with --format text")


def _file(path: Path, name: str, *, chosen: bool) -> File:
    # Asked now, so that a long preparation does not stop halfway.
    if path.exists() and not os.access(path, os.R_OK):
        raise PermissionError(13, "Permission denied", str(path))
    if path.exists() and not path.is_file():  # to read a pipe is to wait for whoever writes to it
        raise ValueError(f"{path} is no file or folder; {_ACCEPTED}")
    return File(path, name, path.stat().st_size, chosen)


def _is_saved(folder: Path) -> bool:
    """Whether `datasets` wrote this folder. One with several splits is refused, since only some may be wanted."""
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        try:
            choices = ", ".join(str(folder / name) for name in parse_json(splits.read_bytes())["splits"])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{splits} does not name the splits of a saved dataset ({error})") from error
        raise ValueError(f"{folder} holds the splits of a saved dataset; give one of them: {choices}")
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _refuse_saved(folder: Path, files: Sequence[File], format: Format) -> None:
    """A saved dataset further down is no text: taken as such, each of its files would give broken records."""
    marks = (file.path for file in files if file.path.name in ("state.json", "dataset_dict.json"))
    for mark in marks if format == "auto" else ():
        if _is_saved(mark.parent):
            raise ValueError(f"{folder} has a saved dataset in it; give it as an input of its own: {mark.parent}")


def _refuse_twice(found: Sequence[Sequence[File]]) -> None:
    owners: dict[tuple[int, int], tuple[int, Path]] = {}
    for index, files in enumerate(found):
        for file in files:
            stat = file.path.stat()
            owner, path = owners.setdefault((stat.st_dev, stat.st_ino), (index, file.path))
            if owner != index:
                raise ValueError(f"{file.path} is given twice, first as {path}; give each file once")


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Name, bytes and time of change (ns) of a file, or of all files in the folder of a saved dataset."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]


def _refusal(path: Path, error: Exception) -> ValueError:
    culprit, reason = getattr(error, "filename", None) or path, getattr(error, "strerror", None) or error
    return ValueError(f"{culprit} cannot be read ({reason}); {_ACCEPTED}")
