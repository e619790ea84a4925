"""The command line: `armillary-data prepare`, `info` and `pack`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from armillary.core.commands import ending
from armillary.data.formats import open_store
from armillary.data.formats.arrow import is_arrow
from armillary.data.formats.folder import Header, is_folder, verify_folder
from armillary.data.inspection.plot import check_picture, plot_lengths
from armillary.data.inspection.screen import show_info, show_left_out, show_packings
from armillary.data.inspection.statistics import describe, histogram, measure_packings
from armillary.data.parsing import parse_command
from armillary.data.prepare import Preparation, prepare
from armillary.data.prepare.encode import OnInvalid
from armillary.data.prepare.run import Progress
from armillary.data.prepare.sources import Format
from armillary.data.progress import Bar

PROGRAM = "armillary-data"
USAGE = """usage: armillary-data COMMAND [options]

  # text into tokens; stopped at any time, the same command goes on where it was
  armillary-data prepare my/texts --output store --tokenizer bpe
  # how many, how long documents are, and what trees share
  armillary-data info store
  # what each packing costs in rows of 65,536 tokens
  armillary-data pack store --length 64Ki

commands:
  prepare  makes a token store of text, JSONL, Parquet, saved Hugging Face datasets, or folders of such files
  info     shows how many documents and tokens a store has, and how long documents are
  pack     shows what each packing costs, and how even the attention of its rows is spread over shards

armillary-data COMMAND --help lists the options."""
COLUMN = "input_ids"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command. Exits with one line: 2 for what cannot be done, 1 for a disk or worker that fails, 130 for ^C."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    with ending(PROGRAM):
        parse_command(words, {"prepare": prepare_command, "info": info, "pack": pack}, PROGRAM)()


def prepare_command(
    inputs: Positional[tuple[Path, ...]],
    output: Annotated[Path, arg(aliases=["-o"])],
    tokenizer: str = "bytes",
    vocab_size: int = 32_768,
    end_of_document: str | None = None,
    begin_of_document: str | None = None,
    format: Format = "auto",
    text_field: str = "text",
    invalid: OnInvalid = "replace",
    overwrite: bool = False,
    workers: int | None = None,
) -> None:
    """Makes a token store of text, JSONL, Parquet, saved Hugging Face datasets, or folders of such files.

    Four ways to start:
      # bytes of a folder of text
      armillary-data prepare my/texts --output store
      # a tokenizer trained on them first
      armillary-data prepare my/texts --output store --tokenizer bpe --vocab-size 32Ki
      # JSONL, with the tokenizer of a Hugging Face folder
      armillary-data prepare a.jsonl b.jsonl --output store --tokenizer path/to/folder
      # lines such as {"prompt": ..., "completions": [...]}, each prompt stored once
      armillary-data prepare a.jsonl --output store --tokenizer path/to/folder --format trees

    Stopped at any time, the same command goes on where it was.

    Args:
        inputs: files and folders.
        output: folder of the store.
        tokenizer: "bytes", "bpe" (trained on the input first), or a tokenizer.json or the folder that has one.
        vocab_size: of a trained tokenizer.
        end_of_document: name of the token behind each document; by default what the tokenizer's files say.
        begin_of_document: name of a token before each document; by default none.
        format: of all files; auto goes by their suffixes. trees: JSONL of prompts with completions.
        text_field: field of JSONL objects, or column, that holds the text.
        invalid: what to do with text that is not UTF-8; records that are broken are refused or skipped.
        overwrite: start over, and replace the store at the output once the new one is complete.
        workers: processes; by default one for each CPU.
    """
    plan = Preparation(
        *(inputs, output, tokenizer, vocab_size, end_of_document, begin_of_document, format, text_field, invalid),
        overwrite=overwrite,
    )
    with Bar(in_bytes=True, lines=True) as bar:

        def report(now: Progress) -> None:
            bar.show(
                now.doing,
                now.bytes_done,
                now.bytes_all if now.bytes_done else None,
                f"{now.tokens:,} tokens" if now.tokens else "",
            )

        header = prepare(plan, workers, report)
    show_left_out(header)
    print(f"{output}: {header.documents:,} documents, {header.tokens:,} tokens of {header.dtype}")


def info(
    store: Positional[Path],
    plot: Path | None = None,
    verify: bool = False,
    json: bool = False,
    column: str = COLUMN,
) -> None:
    """Shows how many documents and tokens a store has, and how long documents are.

    Two ways to start:
      armillary-data info store
      # reading all of it, with a picture of lengths
      armillary-data info store --verify --plot lengths.png

    Args:
        store: a folder of `armillary-data prepare`, Megatron's .bin and .idx, or a saved Hugging Face dataset.
        plot: write the histogram of lengths as a picture (PNG).
        verify: read everything and compare checksums.
        json: for machines.
        column: of tokens in a saved dataset.
    """
    if plot is not None:
        check_picture(plot, "--plot")
    opened = open_store(store, column=column)
    if column != COLUMN and not is_arrow(store):
        raise ValueError(f"--column {column}: {store} is no saved dataset, and has no columns; leave it out")
    if verify:
        _verify(store)
    if plot is not None:
        plot_lengths(opened, plot)
    if json:
        _print_json(describe(opened) | {"histogram": [asdict(found) for found in histogram(opened.lengths)]})
    else:
        show_info(opened, Header.read(store) if is_folder(store) else None)


def pack(store: Positional[Path], length: int, shards: int = 8, rows: int = 64, json: bool = False) -> None:
    """Shows what each packing costs, and how even the attention of its rows is spread over shards.

    One way to start:
      # rows of 65,536 tokens, each shared by 8 ranks
      armillary-data pack store --length 64Ki --shards 8

    Args:
        store: a token store.
        length: tokens of a row.
        shards: ranks that share a row.
        rows: how many to look at for balance.
        json: for machines.
    """
    with Bar(quiet=json) as bar:
        measured = measure_packings(
            open_store(store), length, shards, rows, lambda done, of: bar.show("measuring rows", done, of)
        )
    if json:
        _print_json([asdict(found) for found in measured])
    else:
        show_packings(measured, length, shards)


def _verify(path: Path) -> None:
    if not is_folder(path):
        raise ValueError(f"{path} has no checksums; only stores of `armillary-data prepare` can be verified")
    sizes = Header.read(path).sizes()
    done = 0
    with Bar(in_bytes=True, lines=True) as bar:
        for size in verify_folder(path):
            done += size
            bar.show("verifying", done, sum(sizes.values()))
    print(f"{path}: all {sum(sizes.values()):,} bytes are what was written", file=sys.stderr)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))
