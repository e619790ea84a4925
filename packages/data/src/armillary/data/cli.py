"""The commands `armillary-data prepare`, `info`, `pack` and `inspect`: one dataclass of flags each, parsed by tyro."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Literal

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional

from armillary.data.console.exit import exit_on_error, print_lines
from armillary.data.console.picture import check_picture, print_written
from armillary.data.formats import open_store
from armillary.data.formats.arrow import is_arrow
from armillary.data.formats.folder import Header, is_folder, verify_folder
from armillary.data.inspection.layouts import bytes_per_token_hop, inspect_layouts
from armillary.data.inspection.plot import plot_layouts, plot_lengths
from armillary.data.inspection.statistics import describe, histogram, measure_packings
from armillary.data.inspection.tables import print_info, print_layouts, print_omissions, print_packings
from armillary.data.loader.batches import check_minimum
from armillary.data.packing import PACKINGS
from armillary.data.parsing import parse
from armillary.data.prepare import Preparation, Progress, prepare
from armillary.data.progress import Bar

PROGRAM = "armillary-data"
COLUMN = "input_ids"
"""Default column of tokens in a saved dataset."""


@dataclass(frozen=True)
class Prepare(Preparation):
    """Makes a token store from text, JSONL, Parquet, saved Hugging Face datasets, or folders of such files.

    Three ways to start:
      # a folder of text, as bytes
      armillary-data prepare my/texts --output store
      # a tokenizer trained on the input
      armillary-data prepare my/texts --output store --tokenizer bpe --vocab-size 32Ki
      # JSONL, with the tokenizer of a Hugging Face folder
      armillary-data prepare a.jsonl b.jsonl --output store --tokenizer path/to/folder

    A run that is interrupted leaves no store; the same command starts again.

    Args:
        workers: number of processes; by default one for each CPU.
    """

    workers: int | None = None

    def run(self) -> None:
        with Bar(in_bytes=True, lines=True) as bar:

            def report(progress: Progress) -> None:
                # Without a total while a tokenizer is trained, which does not report progress.
                total = progress.total_bytes if progress.done_bytes else None
                note = f"{progress.tokens:,} tokens" if progress.tokens else ""
                bar.show(progress.step, progress.done_bytes, total, note)

            header = prepare(self, self.workers, report)
        print_omissions(header)
        print_lines(f"{self.output}: {header.documents:,} documents, {header.tokens:,} tokens of {header.dtype}")


@dataclass(frozen=True)
class Info:
    """Shows the number of documents and tokens of a store, and the lengths of documents.

    Two ways to start:
      armillary-data info store
      # verify checksums, and draw the lengths
      armillary-data info store --verify --plot lengths.png

    Args:
        store: a folder of `armillary-data prepare`, Megatron's .bin and .idx, or a saved Hugging Face dataset.
        plot: write the histogram of lengths to this PNG.
        verify: read all bytes of a store of `armillary-data prepare` and compare checksums.
        json: print JSON.
        column: column of tokens in a saved dataset.
    """

    store: Positional[Path]
    plot: Path | None = None
    verify: bool = False
    json: bool = False
    column: str = COLUMN

    def run(self) -> None:
        if self.plot is not None:
            check_picture(self.plot, "--plot")
        store = open_store(self.store, column=self.column)
        if self.column != COLUMN and not is_arrow(self.store):
            raise ValueError(
                f"--column {self.column}: {self.store} is not a saved dataset and has no columns; omit --column"
            )
        if self.verify:
            verify(self.store)
        if self.plot is not None:
            plot_lengths(store, self.plot)
            print_written(self.plot)
        if self.json:
            print_json(describe(store) | {"histogram": list(map(asdict, histogram(store.lengths)))})
        else:
            print_info(store, Header.read(self.store) if is_folder(self.store) else None)


@dataclass(frozen=True)
class Pack:
    """Shows the cost of each packing, and how evenly the attention of its rows is spread over shards.

    One way to start:
      # rows of 65,536 tokens, each sharded over 8 ranks
      armillary-data pack store --length 64Ki --shards 8

    Args:
        store: a token store.
        length: tokens in a row.
        shards: ranks that share a row.
        rows: number of rows to measure for balance.
        json: print JSON.
    """

    store: Positional[Path]
    length: int
    shards: int = 8
    rows: int = 64
    json: bool = False

    def run(self) -> None:
        store = open_store(self.store)
        with Bar("measuring rows", quiet=self.json) as bar:
            show = partial(bar.show, "measuring rows")
            packings = measure_packings(store, self.length, self.shards, self.rows, show)
        if self.json:
            print_json(list(map(asdict, packings)))
        else:
            print_packings(packings, self.length, self.shards)


@dataclass(frozen=True)
class Inspect:
    """Shows the bytes sent and the balance of each sequence layout on the rows of a store.

    Two ways to start:
      # rows of 65,536 tokens, each sharded over 8 ranks
      armillary-data inspect store --length 64Ki --shards 8
      # for a model with 4 key/value heads, with a picture of one row in each layout
      armillary-data inspect store --length 64Ki --kv-heads 4 --plot layouts.png

    Args:
        store: a token store.
        length: tokens in a row.
        shards: ranks that share a row.
        rows: number of rows to measure.
        packing: packing of documents into rows.
        kv_heads: key/value heads of the model.
        head_dim: size of a head.
        plot: write a picture of the first row to this PNG.
        json: print JSON.
    """

    store: Positional[Path]
    length: int
    shards: int = 8
    rows: int = 16
    packing: Literal["greedy", "best_fit", "one_per_row"] = "best_fit"
    kv_heads: int = 8
    head_dim: int = 128
    plot: Path | None = None
    json: bool = False

    def run(self) -> None:
        if self.plot is not None:
            check_picture(self.plot, "--plot")
        check_minimum(1, kv_heads=self.kv_heads, head_dim=self.head_dim)
        store, token_bytes = open_store(self.store), bytes_per_token_hop(self.kv_heads, self.head_dim)
        with Bar("measuring rows", quiet=self.json) as bar:
            show = partial(bar.show, "measuring rows")
            rows, layouts = inspect_layouts(
                store, self.length, self.shards, self.rows, PACKINGS[self.packing], token_bytes, show
            )
        documents = sum(len(row.pieces) for row in rows) / len(rows)
        if self.plot is not None:
            plot_layouts(rows[0], self.shards, token_bytes, self.plot)
            print_written(self.plot)
        if self.json:
            figures = {"length": self.length, "shards": self.shards, "rows": len(rows), "documents": documents}
            print_json(figures | {"packing": self.packing, "layouts": list(map(asdict, layouts))})
        else:
            print_layouts(layouts, self.length, self.shards, len(rows), documents)


@dataclass(frozen=True)
class DataCommand:
    """usage: armillary-data COMMAND [options]

      # tokenize text
      armillary-data prepare my/texts --output store --tokenizer bpe
      # number of documents, and their lengths
      armillary-data info store
      # cost of each packing in rows of 65,536 tokens
      armillary-data pack store --length 64Ki
      # bytes sent and balance of each sequence layout
      armillary-data inspect store --length 64Ki

    commands:
      prepare  makes a token store from text, JSONL, Parquet, saved Hugging Face datasets, or folders of such files
      info     shows the number of documents and tokens of a store, and the lengths of documents
      pack     shows the cost of each packing, and how evenly the attention of its rows is spread over shards
      inspect  shows the bytes sent and the balance of each sequence layout on the rows of a store

    armillary-data COMMAND --help lists the options.
    """

    command: OmitArgPrefixes[OmitSubcommandPrefixes[Prepare | Info | Pack | Inspect]]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `armillary-data`.

    Prints an error in one line and exits with 2 for invalid input, 1 for a failed disk or worker, 130 for ^C.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["-h"], ["--help"]):  # tyro would print the examples of all commands
        print(cleandoc(DataCommand.__doc__ or ""))
        return
    with exit_on_error(PROGRAM):
        parse(words, DataCommand, PROGRAM).command.run()


def verify(path: Path) -> None:
    """Compares the checksums of a store, with a progress bar.

    Raises:
        ValueError: a store without checksums, or a block that does not match its checksum.
    """
    if not is_folder(path):
        raise ValueError(f"{path} has no checksums; only stores of `armillary-data prepare` can be verified")
    total, verified_bytes = sum(Header.read(path).sizes().values()), 0
    with Bar(in_bytes=True, lines=True) as bar:
        for size in verify_folder(path):
            verified_bytes += size
            bar.show("verifying", verified_bytes, total)
    print(f"{path}: all {total:,} bytes match their checksums", file=sys.stderr)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1))
