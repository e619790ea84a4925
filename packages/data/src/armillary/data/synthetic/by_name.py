"""Tasks by the names that people type."""

from __future__ import annotations

from armillary.core import SequenceLayout
from armillary.data.synthetic.copying import Copy
from armillary.data.synthetic.needle import Needle
from armillary.data.synthetic.recall import AssociativeRecall
from armillary.data.synthetic.task import Task


def build_task(
    name: str, layout: SequenceLayout, seed: int = 0, vocabulary: int | None = None, *, pairs: int, symbols: int
) -> Task:
    """The task of that name, with rows of `layout.length` tokens.

    Args:
        layout: where it has several shards, recall asks for what another shard holds.
        vocabulary: of the model; symbols are fewer where it has no room for more.
        pairs: keys with a value of a row of recall.
        symbols: different keys, values and fillers, or tokens to copy.

    Raises:
        ValueError: rows too short for it, or too few symbols.
    """
    length = layout.length
    kinds, others = (1, 1) if name == "copy" else (3, 0)
    if vocabulary is not None:
        symbols = min(symbols, (vocabulary - others) // kinds)
    match name:
        case "recall":
            return AssociativeRecall(
                length,
                pairs,
                pairs,
                keys=symbols,
                values=symbols,
                fillers=symbols,
                across=layout if layout.shards > 1 else None,
                seed=seed,
            )
        case "needle":
            return Needle(length, keys=symbols, values=symbols, fillers=symbols, seed=seed)
        case _:
            return Copy(length, symbols=symbols, seed=seed)
