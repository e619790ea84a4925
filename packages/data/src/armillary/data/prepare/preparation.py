"""`prepare`: tokenizes input files into the folder of a store, in several processes, all or nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, get_args

from filelock import FileLock, Timeout
from tyro.conf import Positional, Suppress, arg

from armillary.data.formats.store_folder import (
    DOCUMENTS,
    HASHES,
    HEADER,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENS,
    Header,
    StoreWriter,
    is_folder,
    partial_folder,
    write_file,
)
from armillary.data.prepare.encode import Counts, Encoder, OnInvalid, cpu_count, map_in_order, tokenizer_in
from armillary.data.prepare.sources import InputChunk, Invalid, chunks, documents, fingerprint, name_by_line
from armillary.data.store import Vocabulary, token_dtype
from armillary.data.text.tokenizer import BEGIN, TRAINED_END, TextTokenizer, check_vocab_size, decode_utf8, train_bpe

TRAINING_BYTES = 2**28
"""Maximum bytes of text to train a tokenizer on, sampled evenly over the input."""
KEY = "plan"
"""Entry of `Header.summary`: a hash of the input and settings of the preparation."""
FILES = {HEADER, TOKENS, DOCUMENTS, HASHES, TOKENIZER, TOKENIZER_CONFIG, "segments.bin", "progress.json"}
"""Files of a store, and two more of earlier releases."""


@dataclass(frozen=True)
class Preparation:
    """Input, output and settings of a preparation.

    Args:
        inputs: files and folders.
        output: folder of the store.
        tokenizer: "bytes"; "bpe", which is trained on the input; or the path of a tokenizer.json or of its folder.
        vocab_size: vocabulary size of a trained tokenizer.
        end_of_document: name of the token after each document; by default from the tokenizer's files. Tokenizers bytes
            and bpe have their own.
        begin_of_document: name of a token before each document; by default none.
        format: format of all inputs; auto detects it from the suffix of each file.
        text_field: field of JSON objects, or column of a table, with the text.
        invalid: policy for text that is not UTF-8: refuse stops, replace puts U+FFFD for invalid bytes, which tokenizer
            bytes stores as they are, skip leaves the document out. Records that cannot be read are left out with skip,
            and refused otherwise.
        overwrite: replace the store at the output when the new one is complete.
        chunk_bytes: bytes of text that a worker tokenizes at a time, about.
    """

    inputs: Positional[Sequence[Path]]
    output: Annotated[Path, arg(aliases=["-o"])]
    tokenizer: str = "bytes"
    vocab_size: int = 32_768
    end_of_document: str | None = None
    begin_of_document: str | None = None
    format: Annotated[str, arg(metavar="{auto,text,jsonl,parquet}")] = "auto"
    text_field: str = "text"
    invalid: OnInvalid = "replace"
    overwrite: bool = False
    chunk_bytes: Suppress[int] = 1 << 20


@dataclass
class Progress:
    """The current step, bytes of input, and tokens and counts of documents so far."""

    step: str
    done_bytes: int
    total_bytes: int
    tokens: int = 0
    counts: Counts = field(default_factory=Counts)


def prepare(
    plan: Preparation, workers: int | None = None, report: Callable[[Progress], None] = lambda _: None
) -> Header:
    """Prepares a store, all or nothing. Returns the header of the store.

    The same input gives the same bytes, for any number of workers. If the output is already a store of the same input
    and settings, it is not changed, unless `overwrite` is set. Worker processes import the caller's main module, so
    scripts must call this under `if __name__ == "__main__":`.

    Args:
        workers: number of processes; by default the number of available CPUs.
        report: called at the start and after each chunk.

    Raises:
        ValueError: invalid input, tokenizer or settings; another store or other files at the output; another process
            that writes there; an input file that changes meanwhile.
        ImportError: the package that reads a format or the tokenizer is not installed.
        OSError: the output cannot be written, or a worker was killed.
    """
    # 1. Check everything that can be checked without reading the text, which may take hours.
    workers = cpu_count() if workers is None else workers
    _check_settings(plan, workers)
    if plan.output.is_symlink():
        plan = replace(plan, output=_resolve(plan.output))  # replaces the target, not the link
    _check_paths(plan)
    # 2. Cut the input into chunks, and read the tokenizer.
    counts = Counts()

    def leave_out(name: str, reason: str) -> None:
        counts.add(Counts(unread=1, first_unread=f"{name}, since {reason}"))

    input_chunks = chunks(
        plan.inputs, format=plan.format, text_field=plan.text_field, size=plan.chunk_bytes, leave_out=leave_out
    )
    tokenizer = None
    if plan.tokenizer not in ("bytes", "bpe"):
        tokenizer = TextTokenizer.read(plan.tokenizer, plan.end_of_document, plan.begin_of_document)
    # 3. Identify the content of the store: a hash of the input and of the settings that determine it.
    stamp = fingerprint(input_chunks)
    identity = plan.tokenizer if tokenizer is None else tokenizer.identity
    settings = [plan.vocab_size, plan.end_of_document, plan.begin_of_document, plan.invalid]
    key = sha256(json.dumps([stamp, identity, settings]).encode()).hexdigest()[:16]
    try:
        # Raises if the folder is not writable. Without this check, the lock could not create its file and would report
        # that another process holds it.
        plan.output.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=plan.output.parent).close()
        with lock_output(plan.output), _new_folder(plan, key) as folder:
            if folder is None:
                return Header.read(plan.output)
            # 4. Write the tokenizer, trained if necessary, to the folder. Workers read it there.
            step = "training a tokenizer" if plan.tokenizer == "bpe" else "encoding"
            progress = Progress(step, 0, sum(chunk.bytes for chunk in input_chunks), counts=counts)
            report(progress)
            if plan.tokenizer == "bpe":
                tokenizer = train_bpe(_sample(input_chunks), plan.vocab_size)
            if tokenizer is not None:
                names = {"eos_token": tokenizer.end_name, BEGIN: plan.begin_of_document}
                write_file(folder / TOKENIZER_CONFIG, json.dumps(names).encode())
                write_file(folder / TOKENIZER, tokenizer.definition)
            # 5. Tokenize the chunks. They are written in the order of the input, so that a store does not depend on
            # workers.
            stored_tokenizer = tokenizer_in(folder)
            progress.step = "encoding"
            with StoreWriter(folder, token_dtype(stored_tokenizer.vocab_size)) as writer:
                encoded_parts = map_in_order(Encoder(folder, plan.invalid), input_chunks, workers)
                for chunk, (encoded_part, part_counts) in zip(input_chunks, encoded_parts, strict=True):
                    _name_by_line(part_counts, counts, chunk)
                    counts.add(part_counts)
                    writer.add(encoded_part)
                    progress.done_bytes, progress.tokens = progress.done_bytes + chunk.bytes, writer.tokens
                    report(progress)
                # 6. Write the header, which makes the folder a store, unless the input has changed since step 3.
                if fingerprint(input_chunks) != stamp:
                    raise ValueError("an input file has changed while it was read; run the same command again")
                if not writer.documents:
                    raise ValueError(f"{', '.join(map(str, plan.inputs))}: no document contains text")
                summary = {KEY: key, "begin_of_document": plan.begin_of_document, **asdict(counts)}
                return writer.finish(Vocabulary.of(stored_tokenizer), summary)
    except OSError as error:
        remedy = "nothing was kept; run the same command again"
        raise OSError(error.errno, f"{plan.output}: {error.strerror or error}; {remedy}") from error


def _name_by_line(part_counts: Counts, counts: Counts, chunk: InputChunk) -> None:
    """Replaces bytes by lines in the names of a chunk's documents that become the first of `counts`, a few per run."""
    for name in ("first_empty", "first_skipped"):
        document = getattr(part_counts, name)
        if document is not None and getattr(counts, name) is None:
            setattr(part_counts, name, name_by_line(document, chunk))


# -- settings and paths -----------------------------------------------------------------------------------------------


def _check_settings(plan: Preparation, workers: int) -> None:
    """Raises ValueError for settings that would fail later during the run, or would have no effect."""
    if plan.invalid not in get_args(OnInvalid):
        raise ValueError(f"invalid={plan.invalid!r} is not one of {', '.join(map(repr, get_args(OnInvalid)))}")
    if workers < 1:
        raise ValueError(f"workers must be at least 1; got {workers}")
    if plan.tokenizer == "bpe":
        check_vocab_size(plan.vocab_size)
    # "bytes" and "bpe" have fixed special tokens; those of a tokenizer's files are checked when they are read.
    names = {"bytes": (None,), "bpe": (None, TRAINED_END)}.get(plan.tokenizer)
    for setting in ("end_of_document", "begin_of_document"):
        if names and (name := getattr(plan, setting)) not in names:
            accepted_names = " or ".join(repr(name) if name else "none" for name in names)
            raise ValueError(
                f"{setting}={name!r} is not a token of tokenizer {plan.tokenizer!r}; give {accepted_names}"
            )


def _check_paths(plan: Preparation) -> None:
    """Raises ValueError for an output without a name, and for inputs that are stores, are inside it, or contain it."""
    output = _resolve(plan.output)
    if not plan.output.name:
        raise ValueError(f"the output {plan.output} has no name of its own; give the path of a new folder")
    for path in plan.inputs:
        if is_folder(path):
            raise ValueError(f"{path} is a token store already; give text, JSONL, Parquet or a saved dataset")
        if output.is_relative_to(_resolve(path)):
            raise ValueError(f"the output {plan.output} lies in the input {path}; name an output outside of it")
        if _resolve(path).is_relative_to(output):
            raise ValueError(f"the input {path} lies in the output {plan.output}; name another output")


def _resolve(path: Path) -> Path:
    """Returns the path with symbolic links resolved. Raises ValueError for circular links and invalid paths."""
    try:
        target = Path(os.path.realpath(path))
    except ValueError as error:
        raise ValueError(f"{path} is not a valid path: {error}") from error
    if target.is_symlink():  # realpath does not resolve circular links; Path.resolve raises only before Python 3.13
        raise ValueError(f"{path} is a circular link")
    return target


# -- the text to train a tokenizer on ---------------------------------------------------------------------------------


def _sample(input_chunks: Sequence[InputChunk]) -> Iterator[str]:
    """Yields at most `TRAINING_BYTES` bytes of text, from the beginnings of chunks spread evenly over the input."""
    # If the input has k times as many bytes as the sample, every k-th chunk is sampled, and each sampled chunk
    # contributes equally many bytes.
    k = -(-sum(chunk.bytes for chunk in input_chunks) // TRAINING_BYTES)  # rounded up
    sampled_chunks = input_chunks[::k]
    for chunk in sampled_chunks:
        remaining_bytes = -(-TRAINING_BYTES // len(sampled_chunks))
        for document in documents(chunk):
            if not isinstance(document, Invalid) and remaining_bytes > 0:
                yield decode_utf8(document.text[:remaining_bytes])[0]
                remaining_bytes -= len(document.text)


# -- the output -------------------------------------------------------------------------------------------------------


@contextmanager
def lock_output(path: Path) -> Generator[None]:
    """Locks the output. Raises ValueError if another process has locked it."""
    # The system releases the lock of a killed process.
    lock = path.with_name(path.name + ".lock")
    try:
        with FileLock(lock, blocking=False):
            try:
                yield
            finally:
                # Removed while it is still locked: a process that has opened this file already cannot lock it
                # afterwards, because filelock refuses a lock on a file without a name.
                lock.unlink(missing_ok=True)
    except Timeout as error:
        raise ValueError(f"another process is preparing {path}; wait for it, or name another output") from error


@contextmanager
def _new_folder(plan: Preparation, key: str) -> Generator[Path | None]:
    """Yields an empty folder, which is renamed to the output at the end of the block, and removed if the block raises.

    Yields None if the output is a store with this key, unless `overwrite` replaces it.

    Raises:
        ValueError: the output is not a store; or it is one with another key, and `overwrite` is not set; foreign files
            in folders to remove.
    """
    output, folder, replaced = plan.output, partial_folder(plan.output), Path(f"{plan.output}.replaced")
    # 1. Clean up after killed runs: finish or undo the second of the renames below, and remove incomplete folders.
    if is_folder(replaced) and not output.exists():
        replaced.rename(output)
    for remains in (replaced, folder):
        _remove(remains)
    if output.exists() and not is_folder(output):
        raise ValueError(f"{output} exists and is not a token store; name another output, or move it away")
    if output.exists() and not plan.overwrite:
        if Header.read(output).summary.get(KEY) != key:
            raise ValueError(
                f"{output} is a store of other input or settings; name another output, or give --overwrite"
            )
        yield None
        return
    # 2. Make the store.
    folder.mkdir()
    try:
        yield folder
        # 3. Put it in place. A rename cannot replace a folder that has files, so the old store moves away first.
        if output.exists():
            output.rename(replaced)
        folder.rename(output)
    except BaseException:
        if replaced.exists() and not output.exists():
            replaced.rename(output)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Removes what a killed run left in a folder. Raises ValueError if it has other files than those of a store."""
    if not folder.exists():
        return
    foreign = sorted({file.name.removesuffix(".new").removesuffix(".partial") for file in folder.iterdir()} - FILES)
    if foreign:
        raise ValueError(f"{folder} was not made by `armillary-data prepare`: it has {foreign[0]}; move it away")
    (folder / HEADER).unlink(missing_ok=True)  # first, because a store with missing files must not look like one
    shutil.rmtree(folder)
