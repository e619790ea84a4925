"""Documents of text files, and the text of every Python installation."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, NoReturn

from armillary.core.internal import parse_object, read_file
from armillary.data.errors import readable


@dataclass(frozen=True)
class Document:
    """One document as bytes. Tokenizers decode it, so it need not be UTF-8.

    Args:
        name: identifies the document in messages.
        text: may be empty.
    """

    name: str
    text: bytes = field(repr=False)


def python_corpus() -> list[Document]:
    """Returns about 12 MB of text without a download: Python's standard library and manual, sorted by name.

    Each .py file of the library that is not empty or a test is a document, and so is each topic of `help()`. The text
    depends on the Python release, so all ranks must run the same one.

    Raises:
        FileNotFoundError: this Python has no library on disk, as in frozen applications.
    """
    library = _read_folder(Path(sysconfig.get_path("stdlib")), _is_library)
    sources = [document for document in library if document.name.endswith(".py")]
    manual = [Document(f"pydoc_data/topics/{name}", text.encode()) for name, text in topics.items()]
    return sorted(sources + manual, key=lambda document: document.name)


def read_documents(path: str | os.PathLike[str]) -> list[Document]:
    """Reads a file as one document, or every text file of a folder at any depth, sorted by name.

    Names are relative to the folder, with forward slashes. Hidden files and folders, linked folders, empty files and
    binary files (`binary`) in a folder are left out. A single file is read even if it is binary.

    Raises:
        ValueError: a path that does not exist, cannot be read, or holds no text.
    """
    root, accepted_paths = Path(path), "give a text file, or a folder with text files in it"
    with readable(path, accepted_paths):
        if root.is_dir():
            documents = _read_folder(root, is_visible)
        else:
            documents = [Document(root.name, text)] if (text := read_file(root, None)) else []
    if not documents:
        raise ValueError(f"{path} holds no text; {accepted_paths}")
    return documents


MAX_INVALID = 0.3
"""A file counts as binary if a larger fraction of its first characters is not UTF-8. Latin-1 text of languages with few
accents stays below, Cyrillic text in cp1251 does not."""
MIN_SAMPLE = 64
"""Bytes of the shortest file to which this rule applies."""
SIGNATURES = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip",
    b"ARROW1": "Arrow", b"PAR1": "Parquet", b"%PDF-": "PDF", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip
"""First bytes of common binary formats, which even short files have, and the byte order marks of UTF-16."""


def binary(text: bytes) -> str | None:
    """Returns the reason why the content of a file is not text, or None if it is text."""
    if kind := next((kind for start, kind in SIGNATURES.items() if text.startswith(start)), None):
        return f"it begins like a {kind} file"
    if (offset := text.find(b"\0")) >= 0:
        return f"it has a zero byte, the first at byte {offset}"
    head = text[: 2**16].decode(errors="replace")
    if len(text) >= MIN_SAMPLE and (invalid := head.count("\ufffd")) > MAX_INVALID * len(head):
        return f"{invalid:,} of its first {len(head):,} characters are not UTF-8"
    return None


def json_records(beginning: bytes) -> Literal["array", "lines"] | None:
    """Returns how a .json file holds records, judged by its first bytes: one array of objects, or an object per line.

    None: the file holds no records, such as one object over several lines.
    """
    text = beginning.removeprefix(b"\xef\xbb\xbf").lstrip()
    if re.match(rb"\[\s*\{", text):
        return "array"
    first_line, _, later_lines = text.partition(b"\n")
    try:
        return "lines" if later_lines.lstrip().startswith(b"{") and parse_object(first_line) else None
    except ValueError:
        return None


def _read_folder(root: Path, keep: Callable[[str], bool]) -> list[Document]:
    files = (Document(file.relative_to(root).as_posix(), read_file(file, None)) for file in walk(root, keep))
    return sorted((file for file in files if file.text and not binary(file.text)), key=lambda file: file.name)


def walk(
    root: Path, keep: Callable[[str], bool], leave_out: Callable[[Path, str], None] = lambda path, reason: None
) -> Iterator[Path]:
    """Yields all files under `root`; `keep` is called with each name of a file or folder, and is False to omit it.

    Args:
        leave_out: called with the path of each omitted file or folder, and the reason.
    """

    def refuse(error: OSError) -> NoReturn:  # `os.walk` ignores unreadable folders by default
        raise error

    for folder, folders, names in os.walk(root, onerror=refuse):
        for name in (*folders, *names):
            if not keep(name):
                leave_out(Path(folder, name), "it is hidden")
        folders[:] = filter(keep, folders)
        for path in (Path(folder, name) for name in folders):
            if path.is_symlink():  # `os.walk` does not follow it
                leave_out(path, "it is a link to a folder")
        for path in (Path(folder, name) for name in names if keep(name)):
            if path.is_file():
                yield path
            else:
                leave_out(path, "it is not a regular file")


def is_visible(name: str) -> bool:
    return not name.startswith(".")


def _is_library(name: str) -> bool:
    """Returns True if a file or folder belongs to the text of the standard library.

    False for names that cannot be imported, such as site-packages; tests; caches; build settings of this machine; and
    pydoc_data, whose topics are separate documents.
    """
    stem = name.removesuffix(".py")
    words = {"test", "tests", "pycache", "sysconfigdata"} & set(stem.split("_"))
    return stem.isidentifier() and not words and stem != "pydoc_data"
