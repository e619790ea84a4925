"""Documents of packed rows, reconstructed from position ids that are sharded over ranks.

A token at global position p with position id i (from 0) is in the document that starts at p - i. For each start, ranks
exchange the positions of the first and the last of their tokens with it. So every rank reconstructs the same documents
or raises the same error.
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
    """The tokens of one rank and row whose position ids give the same start of their document.

    Args:
        row: row of the batch.
        start: global position of the document's first token, by these tokens' position ids.
        first, last: global positions of the first and the last of these tokens.
    """

    row: int
    start: int
    first: int
    last: int


POSITIONS_HINT = (
    "pass position_ids=layout.positions(attend.shard)[None], or position ids that restart at 0 in each document"
)


def find_documents(
    position_ids: Tensor, layout: SequenceLayout, method: Method, first_position: int = 0
) -> Documents | None:
    """Returns the boundaries of the documents of whole rows; None if each row is one document.

    Every rank of the method must call this: ranks exchange four integers for each `PackedRun`.

    Args:
        position_ids: [B or 1, T], of this rank's tokens.
        first_position: the position id of a document's first token.

    Raises:
        ValueError: on every rank, if position ids neither are global positions nor restart at `first_position` in each
            document, or if they restart exactly where shards start.
    """
    runs = gather_integers(_runs(position_ids - first_position, layout.positions(method.shard)), method)
    rows = [[PackedRun(*run) for run in runs if run[0] == row] for row in range(position_ids.shape[0])]
    documents = [_boundaries(row_runs, layout.length, first_position) for row_runs in rows]
    _check_not_shards(documents, layout, first_position)
    if all(ends == (0, layout.length) for ends in documents):
        return None
    return documents[0] if len(set(documents)) == 1 else tuple(documents)


def check_positions(position_ids: Tensor, layout: SequenceLayout, method: Method, documents: Documents) -> None:
    """Checks that position ids [B or 1, T] rise from token to token of each document, over all ranks.

    Position ids may start anywhere and skip numbers. Every rank of the method must call this: ranks exchange four
    integers for each `PackedRun`. If the axes of the method are unknown, each rank checks its own tokens only.

    Raises:
        ValueError: with the first position id that does not rise; on every rank, if the axes are known.
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
    """Raises ValueError if a shard has another number of tokens or position ids than the layout gives it.

    Raises on every rank if the axes of the method are known, else on the rank of the wrong shard.
    """
    shards = [[method.shard, tokens, positions]]
    if find_axes(method) is not None:
        shards = gather_integers(shards, method)
    for shard, token_count, id_count in shards:
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
        boundaries: boundaries of each row's documents, if they are known. Then a run is also within one document.
    """
    runs: list[PackedRun] = []
    for row, ids in enumerate(position_ids.cpu().long()):
        ends = torch.tensor(boundaries[row] if boundaries else (0,))
        # Tokens with the same (known document, start) form a run.
        pairs = torch.stack([torch.bucketize(positions, ends, right=True), positions - ids])
        (_, starts), run_of_token = pairs.unique(dim=1, return_inverse=True)
        # The smallest and the largest position in each run; 2**62 and -1 are beyond all positions.
        first = torch.full_like(starts, 2**62).scatter_reduce(0, run_of_token, positions, "amin")
        last = torch.full_like(starts, -1).scatter_reduce(0, run_of_token, positions, "amax")
        runs += [PackedRun(row, *run) for run in zip(starts.tolist(), first.tolist(), last.tolist(), strict=True)]
    return runs


def _spans(runs: Sequence[PackedRun]) -> dict[int, tuple[int, int]]:
    """Merges the runs of all ranks: returns {start: (first position, last position)} of one row."""
    spans: dict[int, tuple[int, int]] = {}
    for _, start, first, last in runs:
        low, high = spans.get(start, (first, last))
        spans[start] = min(low, first), max(high, last)
    return spans


def _check_rising(row: int, runs: Sequence[PackedRun]) -> None:
    """Raises ValueError if position ids do not rise within one document, given its runs on all ranks."""
    # Where ids skip s numbers, start = position - id falls by s; where an id does not rise, start rises. So ids rise
    # exactly if the runs, in order of positions, do not overlap and each has a lower start than the run before.
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
    if starts[0] < 0:
        raise ValueError(
            f"the token at position {spans[starts[0]][0]} of the sequence has position id "
            f"{spans[starts[0]][0] - starts[0] + first_position}, so its document would start before the sequence: "
            f"position ids count from {first_position}; {POSITIONS_HINT}"
        )
    boundaries = (*starts, length)
    for start, end in pairwise(boundaries):
        # The tokens with each start must reach from it to the token before the next start. If all do, no other token is
        # between them, because spans of different starts are disjoint then.
        if spans[start] != (start, end - 1):
            position = spans[start][0]
            raise ValueError(
                f"the token at position {position} of the sequence has position id "
                f"{position - start + first_position}, so its document would start at {start}, which the other "
                f"position ids contradict; {POSITIONS_HINT}"
            )
    return boundaries


def _check_not_shards(boundaries: Sequence[tuple[int, ...]], layout: SequenceLayout, first_position: int) -> None:
    """Raises ValueError if the documents are exactly the shards.

    Then the model most likely counted its local tokens on each rank, which is a common mistake.
    """
    # In layouts with several spans per shard (zigzag) such position ids contradict each other: `_boundaries` raises.
    shards = sorted((layout.spans(shard) for shard in range(layout.shards)), key=lambda spans: spans[0][0])
    shard_ends = (*(spans[0][0] for spans in shards), layout.length)  # 0, end of the first shard, ..., N
    one_span_each = all(len(spans) == 1 for spans in shards)
    if layout.shards > 1 and one_span_each and any(ends == shard_ends for ends in boundaries):
        raise ValueError(
            f"position_ids start at {first_position} on each of the {layout.shards} ranks, as a model's own do; "
            f"{POSITIONS_HINT}. If documents do end where shards do, pass "
            f"`sequence(documents={list(shard_ends[:4])}...)`"
        )
