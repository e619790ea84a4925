"""The plan of a scan: how each rank's tokens are cut into chunks, and which state enters which chunk.

A *run* is a span of a shard cut at the boundaries of segments. The run before it ends with the token that precedes its
first token along the path: in the same segment, or at the end of the parent segment. That run may be on another rank.
Runs are cut into *chunks*. The chunks of a rank are trees: a chunk's parent is the chunk that ends right before it, if
this rank holds it. Ranks exchange the states at the ends of some runs; those are a forest too.

Everything here is computed on the host from the layout and the segments, alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from armillary.core import Segments, SequenceLayout, compat
from armillary.core.collectives.token_moves import Owners
from armillary.core.segments import NONE
from armillary.core.slices import Integers


class ShardRun(NamedTuple):
    """Neighbouring tokens start..stop - 1 of one segment on one rank. `previous` is a run's index, or -1."""

    rank: int
    row: int
    start: int
    stop: int
    previous: int


@dataclass(frozen=True, eq=False)
class Forest:
    """Nodes by depth, roots first.

    Args:
        sizes: nodes of each depth.
        parents: for each node but the roots the index of its parent.
        parents_by_depth: the same from depth 1 on, as indices among the nodes of the depth above.
    """

    sizes: tuple[int, ...]
    parents: Tensor
    parents_by_depth: tuple[Tensor, ...]

    @classmethod
    def of(cls, parents: Sequence[int], device: torch.device) -> Forest:
        """Returns the forest of nodes in depth order with these parents, -1 for roots."""
        sizes = np.bincount(_depths(parents), minlength=1).tolist()
        indices = _indices(parents[sizes[0] :], device)
        starts = accumulate(sizes, initial=0)
        by_depth = [part - start for part, start in zip(indices.split(sizes[1:]), starts, strict=False)]
        return cls(tuple(sizes), indices, tuple(by_depth))


def depth_order(parents: Sequence[int]) -> list[int]:
    """Returns nodes by depth. Their parents are earlier nodes, or -1 for roots."""
    return np.argsort(_depths(parents), kind="stable").tolist()


def _depths(parents: Sequence[int]) -> Integers:
    depths = list[int]()
    for parent in parents:
        depths.append(0 if parent == NONE else depths[parent] + 1)
    return np.array(depths, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class StateExchange:
    """The states that ranks tell each other, and the forest that these form.

    A rank gathers its *entries*: states at the ends of runs. Some have the map from the state that enters the rank's
    tree there, because that state comes from another rank; these are the non-roots of the forest.

    Args:
        states, maps: number of states and maps that each rank gathers.
        own_states: chunks of this rank after which its states are.
        own_maps: the same for maps, as indices of `ScanPlan.entered`.
        state_order, map_order: indices of the gathered states in the order of the forest, and of the gathered maps.
        forest: an entry's parent is the entry that enters the tree in which it is.
        entering: the entry that enters the tree of each of `ScanPlan.entered`.
        last: the entry after the last token of each row.
    """

    states: tuple[int, ...]
    maps: tuple[int, ...]
    own_states: Tensor
    own_maps: Tensor
    state_order: Tensor
    map_order: Tensor
    forest: Forest
    entering: Tensor
    last: Tensor


@dataclass(frozen=True, eq=False)
class ScanPlan:
    """One rank's part of a scan. Tokens are those of all rows of the local batch, row by row.

    Args:
        tokens: [chunks * chunk], the tokens of the chunks in the order of `forest`; any token where there is padding.
        chunk: tokens of a chunk.
        padding: bool [chunks, 1, chunk, 1], True where a chunk has no token; None if all are full.
        places: for each token its index in `tokens`.
        forest: of this rank's chunks.
        first_chunks, first_rows: the roots that hold a row's position 0, and these rows.
        entered: chunks of trees that a state of another rank enters.
        entered_forest: of these.
        exchange: None if there is one rank.
        last_chunks: the chunk that holds the last token of each row, if there is one rank.
    """

    tokens: Tensor
    chunk: int
    padding: Tensor | None
    places: Tensor
    forest: Forest
    first_chunks: Tensor
    first_rows: Tensor
    entered: Tensor
    entered_forest: Forest
    exchange: StateExchange | None
    last_chunks: Tensor


class RunChunks(NamedTuple):
    """The chunks of one rank in the order of their forest.

    Args:
        size: tokens of a chunk; the last one of a run may have fewer.
        runs: the index of each chunk's run.
        starts: the first position of each.
        parents: the chunk before each, or -1.
        last_of_run: for each run of this rank its last chunk.
    """

    size: int
    runs: list[int]
    starts: list[int]
    parents: list[int]
    last_of_run: dict[int, int]

    @classmethod
    def cut(cls, runs: Sequence[ShardRun], rank: int, max_chunk: int) -> RunChunks:
        own_runs = [index for index, run in enumerate(runs) if run.rank == rank]
        longest = max((runs[index].stop - runs[index].start for index in own_runs), default=1)
        size = min(max_chunk, 1 << (longest - 1).bit_length())
        # A run comes after the one before it, and so does a chunk after its parent.
        parents, chunk_runs, starts = list[int](), list[int](), list[int]()
        last_of_run = dict[int, int]()
        for index in own_runs:
            parent = last_of_run.get(runs[index].previous, NONE)
            for start in range(runs[index].start, runs[index].stop, size):
                parents.append(parent)
                parent = len(chunk_runs)
                chunk_runs.append(index)
                starts.append(start)
            last_of_run[index] = parent
        order = depth_order(parents)
        place = {NONE: NONE} | {node: index for index, node in enumerate(order)}
        return cls(
            size,
            [chunk_runs[node] for node in order],
            [starts[node] for node in order],
            [place[parents[node]] for node in order],
            {run: place[node] for run, node in last_of_run.items()},
        )

    def tokens(self, runs: Sequence[ShardRun], layout: SequenceLayout, rank: int) -> tuple[Integers, NDArray[np.bool_]]:
        """Returns (the local index of each token, True where there is one), both [chunks, size].

        Padding has the index of the chunk's first token.
        """
        stops = np.array([runs[run].stop for run in self.runs], dtype=np.int64)
        starts = np.array(self.starts, dtype=np.int64)
        rows = np.array([runs[run].row for run in self.runs], dtype=np.int64)
        _, first = Owners.of(layout).find(starts)
        first = (first + rows * layout.sizes[rank]).reshape(-1, 1)
        # Neighbours in a span with step 1 are neighbours on their rank too.
        within = np.arange(self.size)
        is_token = within < (stops - starts).reshape(-1, 1)
        return np.where(is_token, first + within, first), is_token


# All layers of a step share a plan, whose indices are as long as the shard: few are kept.
@lru_cache(maxsize=8)
@compat.outside_modes
def plan_scan(
    layout: SequenceLayout, rows: tuple[Segments, ...], rank: int, device: torch.device, max_chunk: int
) -> ScanPlan:
    """Returns the plan of a rank. `rows` has the segments of each row of the batch."""
    runs = _runs(layout, rows)
    roots = _tree_roots(runs)
    chunks = RunChunks.cut(runs, rank, max_chunk)
    # Chunks of trees that begin behind another rank's state, and their forest: in order, as they are among all chunks.
    entered = [chunk for chunk, run in enumerate(chunks.runs) if runs[roots[run]].previous != NONE]
    entered_place = {NONE: NONE} | {chunk: index for index, chunk in enumerate(entered)}
    entered_forest = Forest.of([entered_place[chunks.parents[chunk]] for chunk in entered], device)
    first_chunks = [chunk for chunk, run in enumerate(chunks.runs) if chunks.starts[chunk] == runs[run].start == 0]
    exchange, last_chunks = None, list[int]()
    if layout.shards == 1:
        last_chunks = [chunks.last_of_run[index] for index, run in enumerate(runs) if run.stop == layout.length]
    else:
        entering_runs = [runs[roots[chunks.runs[chunk]]].previous for chunk in entered]
        exchange = _exchange(runs, roots, layout, rank, chunks, entered_place, entering_runs, device)
    tokens, is_token = chunks.tokens(runs, layout, rank)
    places = np.empty(len(rows) * layout.sizes[rank], dtype=np.int64)
    places[tokens[is_token]] = np.flatnonzero(is_token)
    return ScanPlan(
        torch.from_numpy(tokens.reshape(-1)).to(device),
        chunks.size,
        None if is_token.all() else torch.from_numpy(~is_token).view(-1, 1, chunks.size, 1).to(device),
        torch.from_numpy(places).to(device),
        Forest.of(chunks.parents, device),
        _indices(first_chunks, device),
        _indices([runs[chunks.runs[chunk]].row for chunk in first_chunks], device),
        _indices(entered, device),
        entered_forest,
        exchange,
        _indices(last_chunks, device),
    )


def _runs(layout: SequenceLayout, rows: tuple[Segments, ...]) -> list[ShardRun]:
    """Returns the runs of all ranks, row by row and by position, so that a run comes after the one before it."""
    runs, by_segments = list[ShardRun](), dict[Segments, list[tuple[int, int, int, int]]]()
    for row, segments in enumerate(rows):
        if segments not in by_segments:
            spans = sorted(
                (run.start, run.stop, s) for s in range(layout.shards) for run in segments.runs(layout.spans(s))
            )
            before = segments.ancestors(np.array([start for start, *_ in spans]), 1)
            ends = {stop - 1: index for index, (_, stop, _) in enumerate(spans)}
            by_segments[segments] = [
                (shard, start, stop, ends.get(position, NONE))
                for (start, stop, shard), position in zip(spans, before.tolist(), strict=True)
            ]
        offset = len(runs)
        runs += [
            ShardRun(shard, row, start, stop, previous if previous == NONE else previous + offset)
            for shard, start, stop, previous in by_segments[segments]
        ]
    return runs


def _tree_roots(runs: Sequence[ShardRun]) -> list[int]:
    """Returns for each run the first run of its tree: the path back to it does not leave the rank."""
    roots = list[int]()
    for index, run in enumerate(runs):
        same_rank = run.previous != NONE and runs[run.previous].rank == run.rank
        roots.append(roots[run.previous] if same_rank else index)
    return roots


def _exchange(
    runs: Sequence[ShardRun],
    roots: Sequence[int],
    layout: SequenceLayout,
    rank: int,
    chunks: RunChunks,
    entered_place: dict[int, int],
    entering_runs: Sequence[int],
    device: torch.device,
) -> StateExchange:
    """Computes what the ranks tell each other. `entering_runs` has the run before the tree of each entered chunk."""
    needed = {run.previous for run in runs if run.previous != NONE and runs[run.previous].rank != run.rank}
    last = [index for index, run in enumerate(runs) if run.stop == layout.length]
    by_position = sorted(needed | {*last})
    entry = {run: index for index, run in enumerate(by_position)}
    parents = [entry.get(runs[roots[run]].previous, NONE) for run in by_position]
    order = depth_order(parents)
    place = {NONE: NONE} | {node: index for index, node in enumerate(order)}
    forest = Forest.of([place[parents[node]] for node in order], device)
    in_forest = [by_position[node] for node in order]

    gathered = sorted(by_position, key=lambda run: runs[run].rank)  # stable: by rank, then by position
    with_maps = [run for run in gathered if runs[roots[run]].previous != NONE]
    state_at = {run: index for index, run in enumerate(gathered)}
    map_at = {run: index for index, run in enumerate(with_maps)}
    own_states, own_maps = ([run for run in some if runs[run].rank == rank] for some in (gathered, with_maps))
    ranks = range(layout.shards)
    return StateExchange(
        tuple(sum(runs[run].rank == other for run in gathered) for other in ranks),
        tuple(sum(runs[run].rank == other for run in with_maps) for other in ranks),
        _indices([chunks.last_of_run[run] for run in own_states], device),
        _indices([entered_place[chunks.last_of_run[run]] for run in own_maps], device),
        _indices([state_at[run] for run in in_forest], device),
        _indices([map_at[run] for run in in_forest[forest.sizes[0] :]], device),
        forest,
        _indices([place[entry[run]] for run in entering_runs], device),
        _indices([place[entry[run]] for run in last], device),
    )


def _indices(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)
