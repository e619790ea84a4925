"""The steps from input files to a store that is in its place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, get_args

import numpy as np

from armillary.data.formats.folder import TOKENIZER, TOKENIZER_CONFIG, Header, is_folder, partial_folder, write_file
from armillary.data.prepare.encode import Counts, Encoder, OnInvalid, tokenizer_in
from armillary.data.prepare.encode_trees import TreeEncoder
from armillary.data.prepare.resume import PROGRESS, alone, begin, clear_older, put_back
from armillary.data.prepare.sources import Format, InputChunk, Invalid, chunks, documents, fingerprint
from armillary.data.prepare.workers import cpus, in_order
from armillary.data.prepare.writer import StoreWriter
from armillary.data.store import Vocabulary
from armillary.data.text.byte_tokenizer import Tokenizer
from armillary.data.text.chat_template import ChatTemplate
from armillary.data.text.tokenizer import TRAINED_END, TextTokenizer, check_vocab_size, decoded, train_bpe
from armillary.data.text.tokenizer_json import BEGIN

TRAINED_ON = 2**28
"""Bytes of text that a tokenizer is trained on at most, in chunks from all over the input."""


@dataclass(frozen=True)
class Preparation:
    """What a store is to be made of.

    Args:
        inputs: files and folders: text, JSONL, Parquet, saved Hugging Face datasets.
        output: the folder of the store.
        tokenizer: "bytes"; "bpe", which is trained on the input first; or a tokenizer.json, or a folder with one in it.
        vocab_size: of a trained tokenizer.
        end_of_document, begin_of_document: names of tokens to put behind and before each document; the first is by
            default what the tokenizer's files say.
        format: of all files; "auto" goes by their suffixes. "trees" are JSONL of prompts with completions.
        text_field: of JSONL objects, and the column of Parquet files and datasets.
        invalid: what to do with text that is not UTF-8, and with broken records.
        overwrite: start anew, and replace the store that is at `output` once the new one is complete.
        chunk_bytes: text that a worker takes at a time.
    """

    inputs: Sequence[Path]
    output: Path
    tokenizer: str = "bytes"
    vocab_size: int = 32_768
    end_of_document: str | None = None
    begin_of_document: str | None = None
    format: Format = "auto"
    text_field: str = "text"
    invalid: OnInvalid = "replace"
    overwrite: bool = False
    chunk_bytes: int = 1 << 20


@dataclass
class Progress:
    """How far a preparation is: what it is doing, bytes of input, tokens so far, and what became of documents."""

    doing: str
    bytes_done: int
    bytes_all: int
    tokens: int = 0
    counts: Counts = field(default_factory=Counts)


def prepare(
    plan: Preparation, workers: int | None = None, report: Callable[[Progress], None] = lambda _: None
) -> Header:
    """Makes the store, or goes on where a run that was stopped left it; returns its header.

    The same input gives the same files byte for byte, whatever the number of workers and however often it was stopped.
    A store that is there and was made of just this is left as it is. Worker processes import the caller's main module,
    so a script calls this under `if __name__ == "__main__":`.

    Args:
        workers: processes; by default as many as there are CPUs to run on.
        report: called after each step.

    Raises:
        ValueError: input, tokenizer or settings that will not do; something else at `output`; another process at work.
        OSError: the disk is full or gone, or a worker was killed. What is done is kept, and the same call goes on.
    """
    workers = cpus() if workers is None else workers
    _check_settings(plan, workers)
    if plan.output.is_symlink():
        plan = replace(plan, output=resolved(plan.output))  # what it points to is what is meant
    _check_places(plan)
    found = chunks(plan.inputs, format=plan.format, text_field=plan.text_field, size=plan.chunk_bytes)
    key = plan_key(plan, found)
    try:
        _check_writable(plan.output)
        with alone(plan.output):
            put_back(plan.output)
            if plan.output.exists():
                _check_is_store(plan.output)
                if not plan.overwrite:
                    return _finished(plan.output, key)
            begin(plan.output, key, plan.overwrite)
            doing = "training a tokenizer" if plan.tokenizer == "bpe" else "reading the tokenizer"
            report(Progress(doing, 0, sum(chunk.bytes for chunk in found)))
            return encode(plan, found, key, choose_tokenizer(plan, found), workers, report)
    except OSError as error:
        kept = "what is done is kept: run the same command again to go on"
        raise OSError(error.errno, f"{plan.output}: {error.strerror or error}; {kept}") from error


def plan_key(plan: Preparation, found: Sequence[InputChunk]) -> str:
    """Changes when anything does that the store's content depends on."""
    names = ("vocab_size", "end_of_document", "begin_of_document", "invalid")
    given = plan.tokenizer if plan.tokenizer in ("bytes", "bpe") else given_tokenizer(plan).identity
    settings: list[Any] = [fingerprint(found), given, [getattr(plan, name) for name in names]]
    if (template := chat_template(plan)) is not None:
        settings.append(template.config)
    return sha256(json.dumps(settings).encode()).hexdigest()[:16]


def given_tokenizer(plan: Preparation) -> TextTokenizer:
    return TextTokenizer.read(plan.tokenizer, plan.end_of_document, plan.begin_of_document)


def chat_template(plan: Preparation) -> ChatTemplate | None:
    """That of the tokenizer's folder, for trees."""
    if plan.format != "trees" or plan.tokenizer in ("bytes", "bpe"):
        return None
    path = Path(plan.tokenizer)
    return ChatTemplate.read(path if path.is_dir() else path.parent)


def choose_tokenizer(plan: Preparation, found: Sequence[InputChunk]) -> Tokenizer:
    """Puts the tokenizer into the folder of the store, trained if need be, and reads it from there."""
    folder = partial_folder(plan.output)
    if plan.tokenizer != "bytes" and not (folder / TOKENIZER).exists():
        is_trained = plan.tokenizer == "bpe"
        made = train_bpe(_sample(found), plan.vocab_size) if is_trained else given_tokenizer(plan)
        template = chat_template(plan)
        names = {"eos_token": made.end_name, BEGIN: plan.begin_of_document}
        config = names | ({} if template is None else template.config)
        write_file(folder / TOKENIZER_CONFIG, json.dumps(config).encode())
        write_file(folder / TOKENIZER, made.definition)
    return tokenizer_in(folder)


def encode(
    plan: Preparation,
    found: Sequence[InputChunk],
    key: str,
    tokenizer: Tokenizer,
    workers: int,
    report: Callable[[Progress], None],
) -> Header:
    """Adds what is still missing to the folder of the store, and moves it into its place.

    Raises:
        ValueError: there is not a single document in the input.
    """
    trees = plan.format == "trees"
    encoder = (TreeEncoder if trees else Encoder)(partial_folder(plan.output), plan.invalid)
    dtype = np.dtype(np.min_scalar_type(tokenizer.vocab_size - 1))
    with StoreWriter(plan.output, dtype, trees) as writer:
        progress = Progress("encoding", sum(chunk.bytes for chunk in found[: writer.parts]), 0, writer.tokens)
        progress.bytes_all, progress.counts = sum(chunk.bytes for chunk in found), Counts(**writer.counts)
        rest = found[writer.parts :]
        for chunk, encoded in zip(rest, in_order(encoder, rest, workers), strict=True):
            progress.counts.add(encoded.counts)
            writer.add(encoded.part(tokenizer.end_of_document, dtype), asdict(progress.counts))
            progress.bytes_done, progress.tokens = progress.bytes_done + chunk.bytes, writer.tokens
            report(progress)
        if plan_key(plan, found) != key:
            raise ValueError("an input file has changed while it was read; start over with --overwrite")
        if not writer.documents:
            raise ValueError(f"{', '.join(map(str, plan.inputs))}: no document in there holds any text")
        summary = {"plan": key, "begin_of_document": plan.begin_of_document, **asdict(progress.counts)}
        return writer.finish(Vocabulary.of(tokenizer), summary)


def _check_settings(plan: Preparation, workers: int) -> None:
    """Refuses early what would stop a preparation halfway, or be passed over."""
    if plan.invalid not in get_args(OnInvalid):
        raise ValueError(f"invalid={plan.invalid!r} is not one of {', '.join(map(repr, get_args(OnInvalid)))}")
    if workers < 1:
        raise ValueError(f"workers must be at least 1; got {workers}")
    if plan.tokenizer == "bpe":
        check_vocab_size(plan.vocab_size)
    known = {"bytes": (None,), "bpe": (None, TRAINED_END)}.get(plan.tokenizer)
    for setting in ("end_of_document", "begin_of_document"):
        if known and (name := getattr(plan, setting)) not in known:
            accepted = " or ".join(repr(name) if name else "none" for name in known)
            raise ValueError(f"{setting}={name!r} is not a token of tokenizer {plan.tokenizer!r}; give {accepted}")


def _check_places(plan: Preparation) -> None:
    """Refuses inputs that are stores, and an output that would be part of its own input, or take its place."""
    output = resolved(plan.output)
    if not plan.output.name:
        raise ValueError(f"the output {plan.output} has no name of its own; give the path of a folder to be made")
    for path in plan.inputs:
        if is_folder(path):
            raise ValueError(f"{path} is a token store already; give text, JSONL, Parquet or a saved dataset")
        if output.is_relative_to(resolved(path)):
            raise ValueError(f"the output {plan.output} lies in the input {path}; name an output outside of it")
        if resolved(path).is_relative_to(output):
            raise ValueError(f"the input {path} lies in the output {plan.output}; name another output")


def _check_writable(output: Path) -> None:
    """Makes the folder that the store is to be in, and raises the OSError of one that cannot be written to.

    Without it a lock that cannot be made looks like one that somebody else has."""
    output.parent.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=output.parent).close()


def resolved(path: Path) -> Path:
    """Returns the path without links.

    Raises:
        ValueError: links that lead in a circle, or text that no path can be.
    """
    try:
        target = Path(os.path.realpath(path))
    except ValueError as error:
        raise ValueError(f"{path} is no path: {error}") from error
    if target.is_symlink():  # realpath stops at a circle; Path.resolve raises for one before Python 3.13 alone
        raise ValueError(f"{path} is a link that leads back to itself")
    return target


def _check_is_store(output: Path) -> None:
    """Whatever else is there is nothing that a preparation may replace."""
    if not is_folder(output):
        raise ValueError(f"{output} is there and is not a token store; name another output, or move it away")


def _finished(output: Path, key: str) -> Header:
    """The header of a store that was made of just this."""
    header = Header.read(output)
    if header.summary.get("plan") != key:
        raise ValueError(f"{output} is a store of other input or settings; name another output, or give --overwrite")
    if (output / PROGRESS).exists():  # the run that made it was killed in its last moment
        clear_older(output)
    return header


def _sample(found: Sequence[InputChunk]) -> Iterator[str]:
    """Text from the beginning of chunks evenly spread over the input, `TRAINED_ON` bytes in all at most."""
    chosen = found[:: -(-sum(chunk.bytes for chunk in found) // TRAINED_ON)]
    for chunk in chosen:
        room = -(-TRAINED_ON // len(chosen))
        for document in documents(chunk):
            if not isinstance(document, Invalid) and room > 0:
                yield decoded(document.text[:room])[0]
                room -= len(document.text)
