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
from armillary.data.formats import open_store
from armillary.data.formats.arrow import is_arrow
from armillary.data.formats.folder import Header, is_folder, verify_folder
from armillary.data.inspection.layouts import LayoutStatistics, bytes_per_token_hop, measure_layouts, packed_rows
from armillary.data.inspection.statistics import describe, histogram
from armillary.data.inspection.tables import print_info, print_layouts, print_omissions
from armillary.data.loader.batches import check_minimum
from armillary.data.loader.epochs import PackedRow
from armillary.data.packing import PACKINGS
from armillary.data.parsing import parse, refuse_removed
from armillary.data.prepare import Preparation, Progress, prepare
from armillary.data.progress import Bar
from armillary.data.store import TokenStore

PROGRAM = "armillary-data"
COLUMN = "input_ids"
"""Default column of tokens in a saved dataset."""
REMOVED = {
    "inspect": "it is `armillary-data info STORE --length N`",
    "pack": "`armillary-data info STORE --length N --packing NAME` shows the cost of layouts under a packing",
    "--plot": "nothing is drawn; `armillary-data info STORE --json` prints the numbers",
}
"""Commands and flags of earlier versions, with what to write instead."""


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
    """Shows the number of documents and tokens of a store, the lengths of documents, and the cost of sequence layouts.

    Three ways to start:
      armillary-data info store
      # verify checksums
      armillary-data info store --verify
      # bytes sent and balance of each layout, in rows of 65,536 tokens, each sharded over 8 ranks
      armillary-data info store --length 64Ki --shards 8

    Args:
        store: a folder of `armillary-data prepare`, Megatron's .bin and .idx, or a saved Hugging Face dataset.
        verify: read all bytes of a store of `armillary-data prepare` and compare checksums.
        json: print JSON.
        column: column of tokens in a saved dataset.
        length: tokens in a row; the other options below are for its table of layouts.
        shards: ranks that share a row.
        rows: number of rows to measure.
        packing: packing of documents into rows.
        kv_heads: key/value heads of the model.
        head_dim: size of a head.
    """

    store: Positional[Path]
    verify: bool = False
    json: bool = False
    column: str = COLUMN
    length: int | None = None
    shards: int = 8
    rows: int = 16
    packing: Literal["greedy", "best_fit", "one_per_row"] = "best_fit"
    kv_heads: int = 8
    head_dim: int = 128

    def run(self) -> None:
        store = open_store(self.store, column=self.column)
        if self.column != COLUMN and not is_arrow(self.store):
            raise ValueError(
                f"--column {self.column}: {self.store} is not a saved dataset and has no columns; omit --column"
            )
        if self.verify:
            verify(self.store)
        rows, layouts = ([], []) if self.length is None else self.measure(store, self.length)
        pieces = sum(len(row.pieces) for row in rows) / max(len(rows), 1)
        if self.json:
            figures = describe(store) | {"histogram": list(map(asdict, histogram(store.lengths)))}
            if layouts:
                sizes = {"length": self.length, "shards": self.shards, "rows": len(rows), "pieces": pieces}
                figures |= {"packed": sizes | {"packing": self.packing}, "layouts": list(map(asdict, layouts))}
            print_json(figures)
            return
        print_info(store, Header.read(self.store) if is_folder(self.store) else None)
        if self.length is not None:
            print()
            print_layouts(layouts, self.length, self.shards, len(rows), pieces)

    def measure(self, store: TokenStore, length: int) -> tuple[list[PackedRow], list[LayoutStatistics]]:
        """Returns the first rows of `length` tokens, and the cost of each layout on them."""
        check_minimum(1, kv_heads=self.kv_heads, head_dim=self.head_dim, length=length)
        token_bytes = bytes_per_token_hop(self.kv_heads, self.head_dim)
        with Bar("measuring rows", quiet=self.json) as bar:
            rows = packed_rows(store, length, PACKINGS[self.packing], self.rows)
            return rows, measure_layouts(rows, self.shards, token_bytes, partial(bar.show, "measuring rows"))


@dataclass(frozen=True)
class DataCommand:
    """usage: armillary-data COMMAND [options]

      # tokenize text
      armillary-data prepare my/texts --output store --tokenizer bpe
      # number of documents, and their lengths
      armillary-data info store
      # bytes sent and balance of each sequence layout, in rows of 65,536 tokens
      armillary-data info store --length 64Ki

    commands:
      prepare  makes a token store from text, JSONL, Parquet, saved Hugging Face datasets, or folders of such files
      info     shows the documents and tokens of a store, and the cost of each sequence layout on its rows

    armillary-data COMMAND --help lists the options.
    """

    command: OmitArgPrefixes[OmitSubcommandPrefixes[Prepare | Info]]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `armillary-data`.

    Prints an error in one line and exits with 2 for invalid input, 1 for a failed disk or worker, 130 for ^C.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["-h"], ["--help"]):  # tyro would print the examples of all commands
        print(cleandoc(DataCommand.__doc__ or ""))
        return
    with exit_on_error(PROGRAM):
        # The command, and flags: other words may be paths.
        refuse_removed([*words[:1], *(word for word in words if word.startswith("--"))], REMOVED)
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
