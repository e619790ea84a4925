"""What a person sees of the commands: tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from armillary.core.table import Column, print_table
from armillary.data.formats.folder import Header
from armillary.data.inspection.statistics import MeasuredPacking, describe, histogram
from armillary.data.store import TokenStore

BAR = 24
"""Characters of the longest bar of a histogram."""


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


UNITS = {
    "mean_length": "mean length, tokens",
    "longest": "longest, tokens",
    "unshared_tokens": "tokens if unshared",
    "stored_percent": "% of these stored",
}
"""Names of figures that do not say what they count."""


def show_info(store: TokenStore, header: Header | None) -> None:
    """Counts and a histogram."""
    for name, value in describe(store).items():
        shown = "unknown" if value is None else f"{value:,.0f}" if isinstance(value, (int, float)) else value
        unit = ", tokens" if name.startswith("p") and name[1:].isdigit() else ""
        print(f"{UNITS.get(name, name.replace('_', ' ') + unit):20} {shown}")
    if header is not None:
        show_left_out(header)
    print()
    show_lengths(store)


def show_lengths(store: TokenStore) -> None:
    """Documents and tokens by the length of documents."""
    bins = histogram(store.lengths)
    most = max((found.documents for found in bins), default=0)
    rows: list[list[str]] = []
    for found in bins:
        bar = "█" * round(BAR * found.documents / most) or ("▏" if found.documents else "")
        shown = f"{found.least:,}" if found.least == found.most else f"{found.least:,} to {found.most:,}"
        rows.append([shown, f"{found.documents:,}", f"{100 * found.tokens / max(store.tokens, 1):.1f}", bar])
    heads = [Column("tokens in a document"), Column("documents"), Column("share of tokens (%)"), Column("", text=True)]
    print_table(heads, rows)


def show_packings(measured: Sequence[MeasuredPacking], length: int, shards: int) -> None:
    """What packings cost, and how even their rows are: a column for each."""
    rows = {
        "rows in an epoch": [f"{m.waste.rows:,}" for m in measured],
        "padding (% of all tokens)": [f"{100 * m.waste.padding:.2f}" for m in measured],
        "dropped (% of all tokens)": [f"{100 * m.waste.dropped:.2f}" for m in measured],
        "cut (% of all documents)": [f"{100 * m.waste.cut:.2f}" for m in measured],
        "pieces in a row": [f"{m.documents:.1f}" for m in measured],
        "zigzag: balance": [f"{m.zigzag:.3f}" for m in measured],
        "zigzag: worst row": [f"{m.worst_zigzag:.3f}" for m in measured],
        "balanced: balance": [f"{m.balanced:.3f}" for m in measured],
        "balanced: worst row": [f"{m.worst_balanced:.3f}" for m in measured],
        "balanced: most spans of a shard": [f"{m.spans}" for m in measured],
    }
    print(f"rows of {length:,} tokens, {shards} shards; balance is the slowest shard over the mean\n")
    heads = [Column("packing", text=True), *(Column(m.packing) for m in measured)]
    print_table(heads, [[name, *values] for name, values in rows.items()])
