"""The commands `armillary-data prepare` and `armillary-data info`: one dataclass of flags each, parsed by tyro."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Literal

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional

from armillary.data.console.exit import exit_on_error, one_line, print_lines
from armillary.data.console.output import Bar, Column, print_table
from armillary.data.console.parsing import parse, refuse_removed
from armillary.data.detection import open_store
from armillary.data.formats.foreign import is_arrow
from armillary.data.formats.store_folder import Header, is_folder, verify_folder
from armillary.data.inspection import (
    LayoutStatistics,
    bytes_per_token_hop,
    describe,
    histogram,
    measure_layouts,
    packed_rows,
)
from armillary.data.loader.batches import check_minimum
from armillary.data.packing import PACKINGS
from armillary.data.prepare import Preparation, Progress, prepare
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
        rows, layouts = [], []
        if self.length is not None:
            check_minimum(1, kv_heads=self.kv_heads, head_dim=self.head_dim)
            token_bytes = bytes_per_token_hop(self.kv_heads, self.head_dim)
            with Bar("measuring rows", quiet=self.json) as bar:
                rows = packed_rows(store, self.length, PACKINGS[self.packing], self.rows)
                layouts = measure_layouts(rows, self.shards, token_bytes, partial(bar.show, "measuring rows"))
        pieces = sum(len(row.pieces) for row in rows) / max(len(rows), 1)
        if self.json:
            figures = describe(store) | {"histogram": list(map(asdict, histogram(store.lengths)))}
            if layouts:
                sizes = {"length": self.length, "shards": self.shards, "rows": len(rows), "pieces": pieces}
                figures |= {"packed": sizes | {"packing": self.packing}, "layouts": list(map(asdict, layouts))}
            print(json.dumps(figures, indent=1))
            return
        print_info(store, Header.read(self.store) if is_folder(self.store) else None)
        if layouts:
            heading = f"{len(rows)} rows of {self.length:,} tokens with {pieces:.1f} pieces of documents each"
            print(f"\n{heading}, {self.shards} shards;")
            print_layouts(layouts, len(rows))


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
        command = parse(words, DataCommand, PROGRAM).command
        with fields_as_flags(command):
            command.run()


@contextmanager
def fields_as_flags(options: Prepare | Info) -> Generator[None]:
    """Context manager that names a field as its flag where the message of a ValueError begins with it."""
    try:
        yield
    except ValueError as error:
        name, space, message = str(error).partition(" ")
        if name not in {field.name for field in fields(options)}:
            raise
        raise ValueError(f"--{name.replace('_', '-')}{space}{message}") from error


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


# -- printed output ---------------------------------------------------------------------------------------------------

BAR_WIDTH = 24
"""Characters of the longest bar of a histogram."""

LABELS = {
    "mean_length": "mean length, tokens",
    "longest": "longest, tokens",
}
"""Labels of statistics that differ from their names."""


def print_omissions(header: Header) -> None:
    """Prints a line for each reason why documents of the input were left out or changed."""
    sentences = {
        "unread": "files and folders were not read; the first is {first}",
        "empty": "documents without text were left out; the first is {first}",
        "binary": "binary files were left out; the first is {first}",
        "replaced": "documents are not valid UTF-8: U+FFFD replaces their invalid bytes; the first is {first}",
        "skipped": "documents were skipped as broken; the first is {first}",
    }
    for name, sentence in sentences.items():
        if header.summary.get(name):
            print_lines(f"{header.summary[name]:,} {sentence.format(first=header.summary.get(f'first_{name}'))}")


def print_info(store: TokenStore, header: Header | None) -> None:
    """Prints the statistics of a store, the omissions in its header if it has one, and a histogram of lengths."""
    for name, value in describe(store).items():
        text = "unknown" if value is None else f"{value:,.0f}" if isinstance(value, (int, float)) else one_line(value)
        unit = ", tokens" if name.startswith("p") and name[1:].isdigit() else ""
        print_lines(f"{LABELS.get(name, name.replace('_', ' ') + unit):20} {text}")
    if header is not None:
        print_omissions(header)
    print()
    bins = histogram(store.lengths)
    largest = max((b.documents for b in bins), default=0)
    rows: list[list[str]] = []
    for b in bins:
        bar = "█" * round(BAR_WIDTH * b.documents / largest) or ("▏" if b.documents else "")
        lengths = f"{b.minimum:,}" if b.minimum == b.maximum else f"{b.minimum:,} to {b.maximum:,}"
        rows.append([lengths, f"{b.documents:,}", f"{100 * b.tokens / max(store.tokens, 1):.1f}", bar])
    heads = [Column("tokens in a document"), Column("documents"), Column("share of tokens (%)"), Column("", text=True)]
    print_table(heads, rows)


def print_layouts(layouts: Sequence[LayoutStatistics], rows: int) -> None:
    """Prints the cost of layouts on a number of rows, a line for each layout."""
    print("MiB that a rank sends in a layer, forward and backward, around a ring;")
    print("pairs and tokens: fullest shard over the mean; worst: the same in the worst row\n")
    names = ("sent (MiB)", "hops", "pairs", "worst", "tokens", "worst", "spans")
    lines = [
        [
            each.layout if each.rows == rows else f"{each.layout} ({each.rows} rows)",
            f"{each.sent_bytes / 2**20:,.1f}",
            f"{each.hops:.3f}",
            *(f"{x:.3f}" for x in (each.pairs, each.worst_pairs, each.tokens, each.worst_tokens)),
            f"{each.spans}",
        ]
        for each in layouts
    ]
    print_table([Column("layout", text=True), *map(Column, names)], lines)
