"""Printed output of `armillary-data info` and `prepare`."""

from __future__ import annotations

from collections.abc import Sequence

from armillary.data.console.exit import one_line, print_lines
from armillary.data.console.table import Column, print_table
from armillary.data.formats.folder import Header
from armillary.data.inspection.layouts import LayoutStatistics
from armillary.data.inspection.statistics import describe, histogram
from armillary.data.store import TokenStore

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
        "empty": "documents without text were left out",
        "binary": "binary files were left out",
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


def print_layouts(layouts: Sequence[LayoutStatistics], length: int, shards: int, rows: int, documents: float) -> None:
    """Prints the cost of layouts, a row for each.

    Args:
        documents: mean number of pieces of documents in a row.
    """
    print(f"{rows} rows of {length:,} tokens with {documents:.1f} pieces of documents each, {shards} shards;")
    print("MiB that a rank sends in a layer, forward and backward, around a ring;")
    print("pairs and tokens: fullest shard over the mean; worst: the same in the worst row\n")
    names = ("sent (MiB)", "hops", "pairs", "worst", "tokens", "worst", "spans")
    heads = [Column("layout", text=True), *map(Column, names)]
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
    print_table(heads, lines)
