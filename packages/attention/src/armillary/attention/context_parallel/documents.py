"""Documents of packed rows, reconstructed from position ids that are sharded over ranks.

A token at global position p with position id i is in the document that starts at p - i. Ranks exchange
the starts of their tokens, with the first and last token of each start, so that every rank reconstructs the same
documents or raises the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.attention.context_parallel.communication import find_axes, gather_integers
from armillary.attention.context_parallel.sequence import check_tokens
from armillary.attention.mask import AttentionMask
from armillary.attention.mask.content import Documents
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout


class PackedRun(NamedTuple):
    """A rank's tokens of one row whose document starts at `start`, from `first` to `last`, in global positions."""

    row: int
    start: int
    first: int
    last: int


POSITIONS_HINT = (
    "pass position_ids=layout.positions(attend.shard)[None], or position ids that restart at 0 in each document"
)


def find_documents(position_ids: Tensor, layout: SequenceLayout, method: Method, first: int = 0) -> Documents | None:
    """Returns the documents of position ids [B or 1, T] of all ranks; None if each row is one document.

    Every rank of the method must call it: it sends four integers for each document that a rank sees.

    Args:
        first: the position id of a document's first token.

    Raises:
        ValueError: on every rank, if they neither are global positions nor restart at `first` in each document.
    """
    runs = gather_integers(_runs(position_ids - first, layout.positions(method.shard)), method)
    rows = [[PackedRun(*run) for run in runs if run[0] == row] for row in range(position_ids.shape[0])]
    documents = [_boundaries(row_runs, layout.length, first) for row_runs in rows]
    _check_not_shards(documents, layout, first)
    if all(ends == (0, layout.length) for ends in documents):
        return None
    return documents[0] if len(set(documents)) == 1 else tuple(documents)


def check_positions(position_ids: Tensor, layout: SequenceLayout, method: Method, documents: Documents) -> None:
    """Raises ValueError unless position ids [B or 1, T] rise from token to token of each document, over all ranks.

    They may start anywhere and skip positions. Every rank of the method must call it: ranks exchange integers, unless
    the axes of the method are unknown.

    Raises:
        ValueError: on every rank, with the first position id that does not rise.
    """
    # One row of position ids may serve several rows of documents.
    mask = AttentionMask(documents=documents)
    rows = max(len(position_ids), len(documents) if mask.per_row else 1)
    mask.check(layout.length, layout.length, rows)
    boundaries = [mask.boundaries(row) or (0, layout.length) for row in range(rows)]
    runs = _runs(position_ids.expand(rows, -1), layout.positions(method.shard), boundaries)
    if find_axes(method) is not None:
        runs = [PackedRun(*run) for run in gather_integers(runs, method)]
    for row, ends in enumerate(boundaries):
        for low, high in pairwise(ends):
            _check_rising(row, [run for run in runs if run.row == row and low <= run.first < high])


def check_shards(tokens: int, positions: int, layout: SequenceLayout, method: Method) -> None:
    """Raises ValueError on every rank if a shard has other numbers of tokens or position ids than the layout."""
    shards = [[method.shard, tokens, positions]]
    for shard, token_count, id_count in gather_integers(shards, method) if find_axes(method) is not None else shards:
        check_tokens(shard, token_count, layout)
        if id_count != token_count:
            raise ValueError(f"shard {shard} has {token_count} tokens and {id_count} position ids; {POSITIONS_HINT}")


def _runs(
    position_ids: Tensor, positions: Tensor, boundaries: Sequence[Sequence[int]] | None = None
) -> list[PackedRun]:
    """Groups this rank's tokens by the start of their document.

    Args:
        position_ids: [B, T].
        positions: [T], global positions of the tokens.
        boundaries: known documents of each row: equal starts in two of them are two runs.
    """
    runs: list[PackedRun] = []
    for row, ids in enumerate(position_ids.cpu().long()):
        ends = torch.tensor(boundaries[row] if boundaries else (0,))
        # Tokens with the same (known document, start) form a run.
        pairs = torch.stack([torch.bucketize(positions, ends, right=True), positions - ids])
        (_, starts), run_of_token = pairs.unique(dim=1, return_inverse=True)
        first = torch.full_like(starts, 2**62).scatter_reduce(0, run_of_token, positions, "amin")
        last = torch.full_like(starts, -1).scatter_reduce(0, run_of_token, positions, "amax")
        runs += [PackedRun(row, *run) for run in zip(starts.tolist(), first.tolist(), last.tolist(), strict=True)]
    return runs


def _spans(runs: Sequence[PackedRun]) -> dict[int, tuple[int, int]]:
    """Returns {start: (first position, last position)} over the runs of all ranks."""
    spans: dict[int, tuple[int, int]] = {}
    for _, start, first, last in runs:
        low, high = spans.get(start, (first, last))
        spans[start] = min(low, first), max(high, last)
    return spans


def _check_rising(row: int, runs: Sequence[PackedRun]) -> None:
    """Raises ValueError if position ids do not rise within one document, given its runs on all ranks."""
    # Where an id skips s positions, start = position - id falls by s. So ids rise exactly if, in order of positions,
    # runs do not overlap and their starts fall.
    ordered = sorted(_spans(runs).items(), key=lambda span: span[1])
    for (start, (_, last)), (next_start, (first, _)) in pairwise(ordered):
        if last > first or next_start > start:
            raise ValueError(
                f"the token at position {first} of row {row} has position id {first - next_start}, which is not beyond "
                f"those of the tokens before it in its document; {POSITIONS_HINT}"
            )


def _boundaries(runs: Sequence[PackedRun], length: int, first_position: int) -> tuple[int, ...]:
    """Returns the document boundaries of one row, given the runs of all ranks.

    Raises:
        ValueError: the starts do not cut the row into documents.
    """
    spans = _spans(runs)
    starts = sorted(spans)
    boundaries = (*starts, length)
    for start, end in pairwise(boundaries):
        # The tokens of each start must reach from it to the next one. Spans are then disjoint: documents have no holes.
        if spans[start] != (start, end - 1):
            position = spans[start][0]
            raise ValueError(
                f"the token at position {position} of the sequence has position id "
                f"{position - start + first_position}, so its document would start at {start}, which the other "
                f"position ids contradict; {POSITIONS_HINT}"
            )
    if starts[0] != 0:
        raise ValueError(
            f"no row starts with position id {first_position}: the first document would start at {starts[0]}; "
            f"{POSITIONS_HINT}"
        )
    return boundaries


def _check_not_shards(boundaries: Sequence[tuple[int, ...]], layout: SequenceLayout, first_position: int) -> None:
    """Raises ValueError if position ids restart on every rank.

    Documents exactly as long as shards are rare; a model that counts its local tokens is a common mistake.
    """
    # Only in layouts with one span per shard: in others (zigzag) such ids contradict each other, see `_boundaries`.
    shards = sorted((layout.spans(shard) for shard in range(layout.shards)), key=lambda spans: spans[0][0])
    firsts = (*(spans[0][0] for spans in shards), layout.length)
    if layout.shards > 1 and all(len(spans) == 1 for spans in shards) and any(ends == firsts for ends in boundaries):
        raise ValueError(
            f"position_ids start at {first_position} on each of the {layout.shards} ranks, as a model's own do; "
            f"{POSITIONS_HINT}. If documents do end where shards do, pass `sequence(documents={list(firsts[:4])}...)`"
        )
