"""What a person sees of the commands: bars, tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column, Table

from armillary.data.formats.folder import Header
from armillary.data.inspection.statistics import MeasuredPacking, describe, histogram
from armillary.data.prepare.run import Progress as Prepared
from armillary.data.store import TokenStore

BAR = 24
"""Characters of the longest bar of a histogram."""
EVERY = 0.1
"""Where there is no terminal, a line is printed for each such share of the work."""


class Bar:
    """Progress on stderr: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        text = TextColumn("{task.fields[note]}")
        self.bar = Progress(
            *columns, TimeRemainingColumn(), text, console=self.console, disable=not self.console.is_terminal
        )
        self.task = self.bar.add_task("", total=None, note="")
        self._done, self._printed = 0, 0.0

    def report(self, now: Prepared) -> None:
        """Shows how far a preparation is."""
        note = f"{now.tokens:,} tokens" if now.tokens else ""
        self._show(now.doing, now.bytes_done, now.bytes_all, note)

    def advance(self, doing: str, size: int, total: int) -> None:
        """Shows `size` bytes more."""
        self._done += size
        self._show(doing, self._done, total, "")

    def _show(self, doing: str, done: int, total: int, note: str) -> None:
        self.bar.update(self.task, description=doing, completed=done, total=total, note=note)
        share = done / max(total, 1)
        if not self.console.is_terminal and self._printed < share >= min(self._printed + EVERY, 1.0):
            self._printed = share
            self.console.print(f"{doing}: {share:.0%} of {total:,} bytes {note}".rstrip(), markup=False)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()


def show_left_out(header: Header) -> None:
    """A line for each kind of document that is not in the store as it was in the input."""
    counts = header.summary
    sentences = {
        "empty": "documents without text were left out",
        "binary": "binary files were left out",
        "replaced": "documents are not valid UTF-8: U+FFFD stands for what could not be read; the first is {first}",
        "skipped": "documents were skipped as broken; the first is {first}",
    }
    for name, sentence in sentences.items():
        if counts.get(name):
            print(f"{counts[name]:,} {sentence.format(first=counts.get(f'first_{name}'))}")


def show_info(store: TokenStore, header: Header | None) -> None:
    """Counts and a histogram."""
    console, found = Console(highlight=False, soft_wrap=True), describe(store)
    for name, value in found.items():
        shown = "unknown" if value is None else f"{value:,.0f}" if isinstance(value, (int, float)) else value
        console.print(f"{name.replace('_', ' '):16} {shown}", markup=False)
    if header is not None:
        show_left_out(header)
    console.print(lengths_table(store))


def lengths_table(store: TokenStore) -> Table:
    """Documents and tokens by the length of documents."""
    table = Table(Column("tokens in a document", no_wrap=True), "documents", "", "share of tokens")
    bins = histogram(store.lengths)
    most = max((found.documents for found in bins), default=0)
    for found in bins:
        bar = "█" * round(BAR * found.documents / most) or ("▏" if found.documents else "")
        shown = f"{found.least:,}" if found.least == found.most else f"{found.least:,} to {found.most:,}"
        table.add_row(shown, f"{found.documents:,}", bar, f"{found.tokens / max(store.tokens, 1):.1%}")
    return table


def show_packings(measured: Sequence[MeasuredPacking], length: int, shards: int) -> None:
    """What packings cost, and how even their rows are: a column for each."""
    table = Table("", *(m.packing for m in measured))
    for name, values in {
        "rows in an epoch": [f"{m.waste.rows:,}" for m in measured],
        "padding (of all tokens)": [f"{m.waste.padding:.2%}" for m in measured],
        "dropped (of all tokens)": [f"{m.waste.dropped:.2%}" for m in measured],
        "cut (of all documents)": [f"{m.waste.cut:.2%}" for m in measured],
        "pieces in a row": [f"{m.documents:.1f}" for m in measured],
        "zigzag: balance": [f"{m.zigzag:.3f}" for m in measured],
        "zigzag: worst row": [f"{m.worst_zigzag:.3f}" for m in measured],
        "balanced: balance": [f"{m.balanced:.3f}" for m in measured],
        "balanced: worst row": [f"{m.worst_balanced:.3f}" for m in measured],
        "balanced: spans of a shard": [f"up to {m.spans}" for m in measured],
    }.items():
        table.add_row(name, *values)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"rows of {length:,} tokens, {shards} shards; balance is the slowest shard over the mean")
    console.print(table)
