"""Tokenization of input chunks, in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields
from errno import ECHILD
from functools import lru_cache
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Literal, TypeVar

import numpy as np

from armillary.core.internal import read_file
from armillary.data.formats.store_folder import TOKENIZER, TOKENIZER_CONFIG, Part
from armillary.data.prepare.sources import InputChunk, Invalid, documents, name_by_line
from armillary.data.store import stable_hash, token_dtype
from armillary.data.text.corpus import Document
from armillary.data.text.tokenizer import ByteTokenizer, TextTokenizer, Tokenizer, decode_utf8

T = TypeVar("T")
R = TypeVar("R")

OnInvalid = Literal["refuse", "replace", "skip"]
"""Policy for text that is not UTF-8: stop, replace invalid bytes by U+FFFD, or skip the document. Tokens that are bytes
need no replacement. Broken records have no text to replace: "skip" skips them, and both other policies refuse them."""

BATCH_BYTES = 2**20
"""Bytes of text to encode at a time: the result of the `tokenizers` library takes a hundred times as much memory."""
MAX_DOCUMENT = 2**26
"""Bytes of the longest document for the `tokenizers` library, which encodes it at once."""


@dataclass
class Counts:
    """Number of documents by outcome, bytes of text, and the first document of each outcome but the usual one.

    Args:
        unread: files and folders in a folder that were not read, such as hidden ones.
    """

    documents: int = 0
    text_bytes: int = 0
    empty: int = 0
    binary: int = 0
    replaced: int = 0
    skipped: int = 0
    unread: int = 0
    first_empty: str | None = None
    first_binary: str | None = None
    first_replaced: str | None = None
    first_skipped: str | None = None
    first_unread: str | None = None

    def add(self, later: Counts) -> None:
        """Adds the counts of a later chunk."""
        for name in (entry.name for entry in fields(self)):
            value, later_value = getattr(self, name), getattr(later, name)
            # Counts are added. The name of the first document is that of this chunk if it has one, else the later one.
            setattr(self, name, value or later_value if name.startswith("first") else value + later_value)


@dataclass(frozen=True)
class Encoder:
    """Tokenizes chunks with the tokenizer in a folder; without a `tokenizer.json`, tokens are bytes."""

    folder: Path
    invalid: OnInvalid

    def __call__(self, chunk: InputChunk) -> tuple[Part, Counts]:
        """Returns the tokens of a chunk's documents. Raises ValueError for a document that the policy refuses."""
        tokenizer, counts = tokenizer_in(self.folder), Counts()
        dtype = token_dtype(tokenizer.vocab_size)
        end = np.array([tokenizer.end_of_document], dtype)
        arrays, lengths, hashes = [np.empty(0, dtype)], list[int](), list[int]()
        for batch in self._batches(chunk, tokenizer, counts):
            if isinstance(tokenizer, TextTokenizer):
                token_arrays = tokenizer.encode_all([decode_utf8(text)[0] for text in batch])
            else:
                token_arrays = [tokenizer.encode(text).numpy().astype(dtype) for text in batch]
            for text, tokens in zip(batch, token_arrays, strict=True):
                arrays += [tokens, end]
                lengths.append(len(tokens) + 1)
                hashes.append(stable_hash(text))
            counts.documents += len(batch)
            counts.text_bytes += sum(map(len, batch))
        return Part(np.concatenate(arrays), np.array(lengths, np.int64), np.array(hashes, np.uint64)), counts

    def _batches(self, chunk: InputChunk, tokenizer: Tokenizer, counts: Counts) -> Iterator[list[bytes]]:
        """Yields the texts of a chunk in batches of about `BATCH_BYTES`. Counts what is left out or replaced."""
        batch, batch_bytes = list[bytes](), 0
        for document in documents(chunk):
            # 1. Reasons why the document cannot be encoded. A byte tokenizer encodes any bytes, and needs no
            # replacement; other tokenizers encode text, which must be valid UTF-8.
            reason = document.reason if isinstance(document, Invalid) else None
            encodes_text = not isinstance(tokenizer, ByteTokenizer)
            if isinstance(document, Document):
                if encodes_text and (size := len(document.text)) > MAX_DOCUMENT:
                    limit = f"a tokenizer takes documents of at most {MAX_DOCUMENT:,} bytes"
                    reason = f"it has {size:,} bytes, and {limit}: cut it into several documents"
                elif (encodes_text or self.invalid != "replace") and decode_utf8(document.text)[1]:
                    if self.invalid != "replace":
                        reason = "it is not valid UTF-8"
                    else:
                        counts.replaced += 1
                        counts.first_replaced = counts.first_replaced or document.name
            # 2. Leave it out, refuse it, or add it to the batch.
            if isinstance(document, Invalid) and document.binary:
                counts.binary += 1
                counts.first_binary = counts.first_binary or f"{document.name}: {document.reason}"
            elif reason is not None:
                if self.invalid != "skip":
                    place = name_by_line(document.name, chunk)
                    remedy = document.remedy if isinstance(document, Invalid) else "correct it"
                    raise ValueError(f"{place}: {reason}; {remedy}, or skip such documents with --invalid skip")
                counts.skipped, counts.first_skipped = counts.skipped + 1, counts.first_skipped or document.name
            elif isinstance(document, Document) and not document.text:
                counts.empty, counts.first_empty = counts.empty + 1, counts.first_empty or document.name
            elif isinstance(document, Document):
                batch.append(document.text)
                batch_bytes += len(document.text)
                if batch_bytes >= BATCH_BYTES:
                    yield batch
                    batch, batch_bytes = [], 0
        yield batch


def tokenizer_in(folder: Path) -> Tokenizer:
    """Returns the tokenizer in the folder of a store; the last one is cached."""
    files = folder / TOKENIZER, folder / TOKENIZER_CONFIG
    return _build(folder, *map(read_file, files)) if files[0].exists() else ByteTokenizer()


@lru_cache(maxsize=1)
def _build(folder: Path, definition: bytes, config: bytes) -> Tokenizer:
    # The content of the files is part of the cache's key: the same folder may have had another store before.
    return TextTokenizer.read(folder)


# -- workers ----------------------------------------------------------------------------------------------------------


def cpu_count() -> int:
    """Returns the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_order(work: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    """Yields `work(item)` for each item, in order, computed in worker processes. With one worker, in this process.

    Raises:
        ChildProcessError: a process was killed, most likely for lack of memory.
    """
    workers = min(workers, len(items))
    if workers <= 1:
        yield from map(work, items)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__class__.__module__])  # imported once, not in each worker
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker)

    def submit(item: T) -> Future[R]:
        try:
            return pool.submit(work, item)
        except (EOFError, ConnectionError) as error:  # the server that forks workers was killed
            raise BrokenProcessPool from error

    try:
        # Two items in flight for each worker: one is computed while the other waits, so that no worker idles, and the
        # number of results in memory stays bounded.
        queue = iter(items)
        in_flight = deque(submit(item) for item in islice(queue, 2 * workers))
        while in_flight:
            yield in_flight.popleft().result()
            in_flight.extend(submit(item) for item in islice(queue, 1))
    except BrokenProcessPool as error:  # raised by `result` or by `submit`
        text = f"one of {workers} worker processes was killed, as happens when memory is short; take fewer workers"
        raise ChildProcessError(ECHILD, text) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Initializes a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process

    def exit_with_parent() -> None:  # nobody else would end this worker after a kill of its parent
        parent = multiprocessing.parent_process()
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    Thread(target=exit_with_parent, daemon=True).start()
