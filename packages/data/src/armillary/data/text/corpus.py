"""Documents: the user's own text, or the text that every Python installation carries."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import NoReturn


@dataclass(frozen=True)
class Document:
    """One document, as bytes: nothing is decoded before a tokenizer asks for it, so text need not be UTF-8.

    Args:
        name: tells this document from others.
        text: may be empty.
    """

    name: str
    text: bytes = field(repr=False)


def python_corpus() -> list[Document]:
    """About 10 MB of text for a first run, with nothing to download: Python's own library and manual, sorted by name.

    The library is its .py sources without the tests; the manual is the topics of `help()`, prose of up to 60 kB each.
    Each Python release carries its own text, so every rank must run the same one.

    Raises:
        FileNotFoundError: this Python has no library on disk, as in frozen applications.
    """
    library = _read_folder(Path(sysconfig.get_path("stdlib")), _is_module)
    sources = [document for document in library if document.name.endswith(".py")]
    manual = [Document(f"pydoc_data/topics/{name}", text.encode()) for name, text in topics.items()]
    return sorted(sources + manual, key=lambda document: document.name)


def read_documents(path: str | os.PathLike[str]) -> list[Document]:
    """The user's own text: a file is one document; of a folder, every text file at any depth, sorted by name.

    Names are relative to the folder, with forward slashes. Bytes are taken as they are. What is left out of a folder:
    hidden files and folders, folders behind links, empty files, and binary ones (`binary`); a file is read whatever it
    holds.

    Raises:
        ValueError: the path does not exist, it or something under it cannot be read, or it holds no text.
    """
    root, accepted = Path(path), "give a text file, or a folder with text files in it"
    try:
        if root.is_dir():
            documents = _read_folder(root, is_visible)
        else:
            documents = [Document(root.name, text)] if (text := root.read_bytes()) else []
    except OSError as error:
        raise ValueError(f"{error.filename or path} cannot be read ({error.strerror}); {accepted}") from error
    if not documents:
        raise ValueError(f"{path} holds no text; {accepted}")
    return documents


NOISE = 0.3
"""Of a file's characters, the share that are not UTF-8 in what is no text in another encoding either."""
LEAST = 64
"""Bytes of which such a share tells something."""


SIGNATURES = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip",
    b"ARROW1": "Arrow", b"PAR1": "Parquet", b"%PDF-": "PDF",
}  # fmt: skip
"""How files begin that are no text, however short they are."""


def binary(text: bytes) -> str | None:
    """Why the content of a file is not text, None where it may be."""
    if kind := next((kind for start, kind in SIGNATURES.items() if text.startswith(start)), None):
        return f"it begins as one of {kind} does"
    if (place := text.find(b"\0")) >= 0:
        return f"it has a zero byte, the first at byte {place}"
    head = text[: 2**16].decode(errors="replace")
    if len(text) >= LEAST and (broken := head.count("\ufffd")) > NOISE * len(head):
        return f"{broken:,} of its first {len(head):,} characters are not UTF-8"
    return None


def _read_folder(root: Path, keep: Callable[[str], bool]) -> list[Document]:
    """All text under `root`, sorted by name; `keep` as in `walk`."""
    read = (Document(file.relative_to(root).as_posix(), file.read_bytes()) for file in walk(root, keep))
    return sorted((d for d in read if d.text and not binary(d.text)), key=lambda document: document.name)


def walk(root: Path, keep: Callable[[str], bool]) -> Iterator[Path]:
    """All files under `root`; `keep` is asked about the name of each, and of each folder on the way."""
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = filter(keep, folders)
        files = (Path(folder, name) for name in names if keep(name))
        yield from (file for file in files if file.is_file())


def _refuse(error: OSError) -> NoReturn:
    """Without it `os.walk` passes over folders that it may not read."""
    raise error


def is_visible(name: str) -> bool:
    """Whether a file or folder is not hidden."""
    return not name.startswith(".")


def _is_module(name: str) -> bool:
    """Whether a file or folder of this name is part of the library as it was written.

    What can't be imported by its name, such as site-packages, is not. Nor are the build settings of this machine, nor
    pydoc_data, whose topics are documents of their own."""
    stem = name.removesuffix(".py")
    words = {"test", "tests", "pycache", "sysconfigdata"} & set(stem.split("_"))
    return stem.isidentifier() and not words and stem != "pydoc_data"
