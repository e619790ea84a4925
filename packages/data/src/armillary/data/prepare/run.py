"""`prepare`: tokenizes input files into the folder of a store, in several processes and resumable.

The files of the store are first written to the folder `path.partial`, with a key: a hash of inputs and settings. A run
with the same key resumes there. A complete store is moved to `path` by one rename.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, get_args

from tyro.conf import Positional, Suppress, arg

from armillary.data.formats.folder import (
    PREPARATION_KEY,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Header,
    is_folder,
    partial_folder,
    write_file,
)
from armillary.data.prepare.encode import Counts, Encoder, OnInvalid, tokenizer_in
from armillary.data.prepare.encode_trees import TreeEncoder
from armillary.data.prepare.resume import PROGRESS, begin, lock_output, remove_replaced, restore_replaced
from armillary.data.prepare.sources import Format, InputChunk, Invalid, chunks, documents, fingerprint
from armillary.data.prepare.workers import cpu_count, map_in_order
from armillary.data.prepare.writer import StoreWriter
from armillary.data.store import Vocabulary, token_dtype
from armillary.data.text.byte_tokenizer import Tokenizer
from armillary.data.text.chat_template import ChatTemplate
from armillary.data.text.tokenizer import TRAINED_END, TextTokenizer, check_vocab_size, decode_utf8, train_bpe
from armillary.data.text.tokenizer_json import BEGIN

TRAINING_BYTES = 2**28
"""Maximum bytes of text to train a tokenizer on, sampled evenly over the input."""


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
        format: format of all inputs; auto detects it from the suffix of each file. trees: JSONL of prompts with
            completions.
        text_field: JSONL field, or column of a table, with the text.
        invalid: policy for text that is not UTF-8: refuse stops, replace puts U+FFFD for invalid bytes, skip leaves the
            document out. Records that cannot be read are left out with skip, and refused otherwise.
        overwrite: discard an unfinished store of other input or settings, and replace the store at the output when the
            new one is complete.
        chunk_bytes: bytes of text that a worker tokenizes at a time, about.
    """

    inputs: Positional[Sequence[Path]]
    output: Annotated[Path, arg(aliases=["-o"])]
    tokenizer: str = "bytes"
    vocab_size: int = 32_768
    end_of_document: str | None = None
    begin_of_document: str | None = None
    format: Format = "auto"
    text_field: str = "text"
    invalid: OnInvalid = "replace"
    overwrite: bool = False
    chunk_bytes: Suppress[int] = 1 << 20


@dataclass
class Progress:
    """Progress of a preparation: its current step, bytes of input, and tokens and counts of documents so far."""

    step: str
    done_bytes: int
    total_bytes: int
    tokens: int = 0
    counts: Counts = field(default_factory=Counts)


def prepare(
    plan: Preparation, workers: int | None = None, report: Callable[[Progress], None] = lambda _: None
) -> Header:
    """Prepares a store, or resumes an interrupted preparation. Returns the header of the store.

    The same input gives the same bytes, for any number of workers and interruptions. If the output is already a
    complete store of the same input and settings, it is not changed, unless `overwrite` is set. Worker processes import
    the caller's main module, so scripts must call this under `if __name__ == "__main__":`.

    Args:
        workers: number of processes; by default the number of available CPUs.
        report: called at the start and after each chunk.

    Raises:
        ValueError: invalid input, tokenizer or settings; other files at the output; another process that writes there.
        ImportError: the package that reads a format or the tokenizer is not installed.
        OSError: the output cannot be written, or a worker was killed. Finished parts are kept; the same call resumes.
    """
    # 1. Check everything that can be checked without reading the text, which may take hours.
    workers = cpu_count() if workers is None else workers
    _check_settings(plan, workers)
    if plan.output.is_symlink():
        plan = replace(plan, output=_resolve(plan.output))  # replaces the target, not the link
    _check_paths(plan)
    # 2. Cut the input into chunks.
    input_chunks = chunks(plan.inputs, format=plan.format, text_field=plan.text_field, size=plan.chunk_bytes)
    key = preparation_key(plan, input_chunks)
    try:
        # Raises if the folder is not writable. Without this check, `lock_output` would fail to create its file and
        # report that another process holds the lock.
        plan.output.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=plan.output.parent).close()
        with lock_output(plan.output):
            # 3. Clean up after an earlier run, return its complete store, or resume it.
            restore_replaced(plan.output)  # an earlier run may have been killed while it replaced a store
            if plan.output.exists() and (header := _existing_store(plan, key)) is not None:
                return header
            begin(plan.output, key, plan.overwrite)  # resumes if the partial folder has the same key
            # 4. Tokenize the chunks that no earlier run has finished.
            step = "training a tokenizer" if plan.tokenizer == "bpe" else "reading the tokenizer"
            report(Progress(step, 0, sum(chunk.bytes for chunk in input_chunks)))
            return _encode(plan, input_chunks, key, _save_tokenizer(plan, input_chunks), workers, report)
    except OSError as error:
        remedy = "the same command, run again, resumes after the parts that were finished"
        raise OSError(error.errno, f"{plan.output}: {error.strerror or error}; {remedy}") from error


def preparation_key(plan: Preparation, input_chunks: Sequence[InputChunk]) -> str:
    """Returns a hash of the inputs and settings that determine the content of the store."""
    names = ("vocab_size", "end_of_document", "begin_of_document", "invalid")
    tokenizer = plan.tokenizer if plan.tokenizer in ("bytes", "bpe") else _read_tokenizer(plan).identity
    settings: list[Any] = [fingerprint(input_chunks), tokenizer, [getattr(plan, name) for name in names]]
    if (template := _chat_template(plan)) is not None:
        settings.append(template.config)
    return sha256(json.dumps(settings).encode()).hexdigest()[:16]


def _read_tokenizer(plan: Preparation) -> TextTokenizer:
    return TextTokenizer.read(plan.tokenizer, plan.end_of_document, plan.begin_of_document)


def _chat_template(plan: Preparation) -> ChatTemplate | None:
    """Returns the chat template in the tokenizer's folder; only format "trees" can have chat messages."""
    if plan.format != "trees" or plan.tokenizer in ("bytes", "bpe"):
        return None
    path = Path(plan.tokenizer)
    return ChatTemplate.read(path if path.is_dir() else path.parent)


def _save_tokenizer(plan: Preparation, input_chunks: Sequence[InputChunk]) -> Tokenizer:
    """Writes the tokenizer, trained if necessary, to the folder of the store, and reads it from there.

    Workers and resumed runs read the same files, so that all parts are tokenized alike.
    """
    folder = partial_folder(plan.output)
    if plan.tokenizer != "bytes" and not (folder / TOKENIZER).exists():
        is_trained = plan.tokenizer == "bpe"
        tokenizer = train_bpe(_sample(input_chunks), plan.vocab_size) if is_trained else _read_tokenizer(plan)
        template = _chat_template(plan)
        names = {"eos_token": tokenizer.end_name, BEGIN: plan.begin_of_document}
        config = names | ({} if template is None else template.config)
        write_file(folder / TOKENIZER_CONFIG, json.dumps(config).encode())
        write_file(folder / TOKENIZER, tokenizer.definition)
    return tokenizer_in(folder)


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


def _encode(
    plan: Preparation,
    input_chunks: Sequence[InputChunk],
    key: str,
    tokenizer: Tokenizer,
    workers: int,
    report: Callable[[Progress], None],
) -> Header:
    """Tokenizes the chunks that no earlier run has finished, and moves the complete store to the output.

    Raises:
        ValueError: an input without documents, or an input file that changed during the run.
    """
    trees = plan.format == "trees"
    encoder = (TreeEncoder if trees else Encoder)(partial_folder(plan.output), plan.invalid)
    with StoreWriter(plan.output, token_dtype(tokenizer.vocab_size), trees) as writer:
        sizes, counts = [chunk.bytes for chunk in input_chunks], Counts(**writer.counts)
        progress = Progress("encoding", sum(sizes[: writer.parts]), sum(sizes), writer.tokens, counts)
        # Parts are written in input order, so that a store does not depend on workers or interruptions.
        remaining_chunks = input_chunks[writer.parts :]
        for chunk, (encoded_part, part_counts) in zip(
            remaining_chunks, map_in_order(encoder, remaining_chunks, workers), strict=True
        ):
            counts.add(part_counts)
            writer.add(encoded_part, asdict(counts))
            progress.done_bytes, progress.tokens = progress.done_bytes + chunk.bytes, writer.tokens
            report(progress)
        # The key depends on sizes and modification times of the input files.
        if preparation_key(plan, input_chunks) != key:
            raise ValueError("an input file has changed while it was read; start over with --overwrite")
        if not writer.documents:
            raise ValueError(f"{', '.join(map(str, plan.inputs))}: no document contains text")
        summary = {PREPARATION_KEY: key, "begin_of_document": plan.begin_of_document, **asdict(counts)}
        return writer.finish(Vocabulary.of(tokenizer), summary)


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
    """Returns the path with symbolic links resolved.

    Raises:
        ValueError: circular links, or an invalid path, such as one with a zero byte.
    """
    try:
        target = Path(os.path.realpath(path))
    except ValueError as error:
        raise ValueError(f"{path} is not a valid path: {error}") from error
    if target.is_symlink():  # realpath does not resolve circular links; Path.resolve raises only before Python 3.13
        raise ValueError(f"{path} is a circular link")
    return target


def _existing_store(plan: Preparation, key: str) -> Header | None:
    """Returns the header of a complete store at the output, or None if `overwrite` replaces it.

    Raises:
        ValueError: the output is not a store; or it is a store of other input or settings, and `overwrite` is not set.
    """
    if not is_folder(plan.output):
        raise ValueError(f"{plan.output} exists and is not a token store; name another output, or move it away")
    if plan.overwrite:
        return None
    header = Header.read(plan.output)
    if header.summary.get(PREPARATION_KEY) != key:
        raise ValueError(
            f"{plan.output} is a store of other input or settings; name another output, or give --overwrite"
        )
    if (plan.output / PROGRESS).exists():  # an earlier run was killed after its last move, before it had cleaned up
        remove_replaced(plan.output)
    return header
