"""The plan of a scan: the chunks of each rank, their order, and the states that ranks exchange.

- A *run* is a range of adjacent tokens of one segment on one rank. Its *previous* run, maybe on another rank, ends with
  the token before the run's first token: in the same segment, or at the end of the parent segment.
- Runs are cut into *chunks*. The parent of a chunk is the chunk on the same rank that ends right before it, if any. So
  the chunks of a rank form trees.
- A tree of chunks is *dependent* if its first run has a previous run, which is then on another rank. The state that
  enters the tree is known after the exchange.
- A *boundary state* is the state after a run that another rank continues, or after the last token of a row. Boundary
  states form a forest, too: the parent of a boundary state is the one that enters the tree of chunks of its run.

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

from armillary.attention import AttentionMask
from armillary.core import Segments, SequenceLayout
from armillary.core.internal import MISSING, Integers, Owners, compat, segments_of


class ShardRun(NamedTuple):
    """Adjacent tokens start..stop - 1 of one segment on one rank. `previous` is the index of a run, or -1."""

    rank: int
    row: int
    start: int
    stop: int
    previous: int


@dataclass(frozen=True, eq=False)
class Forest:
    """Nodes in the order of their depth, roots first.

    Args:
        sizes: number of nodes of each depth.
        parents: index of the parent of each node that is not a root.
        parents_by_depth: the same parents, one tensor for each depth from 1 on. In it, index 0 is the first node of
            the depth above.
    """

    sizes: tuple[int, ...]
    parents: Tensor
    parents_by_depth: tuple[Tensor, ...]

    @classmethod
    def of(cls, parents: Sequence[int], device: torch.device) -> Forest:
        sizes = np.bincount(_depths(parents), minlength=1).tolist()
        indices = _indices(parents[sizes[0] :], device)
        starts = accumulate(sizes, initial=0)
        by_depth = [part - start for part, start in zip(indices.split(sizes[1:]), starts, strict=False)]
        return cls(tuple(sizes), indices, tuple(by_depth))


def depth_order(parents: Sequence[int]) -> list[int]:
    return np.argsort(_depths(parents), kind="stable").tolist()


def _depths(parents: Sequence[int]) -> Integers:
    # A parent is an earlier node, or -1 for a root.
    depths = list[int]()
    for parent in parents:
        depths.append(0 if parent == MISSING else depths[parent] + 1)
    return np.array(depths, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class StateExchange:
    """The all-gather of boundary states, and the forest in which they are completed.

    A rank sends each of its boundary states as if no state of another rank entered the tree of chunks. If the tree is
    dependent, the rank also sends the map from the state that enters the tree to the boundary state. The boundary
    states that have maps are the non-roots of the forest.

    Args:
        state_counts, map_counts: number of states and maps that each rank sends.
        own_state_chunks: chunks whose leaving states this rank sends.
        own_map_chunks: chunks whose maps this rank sends, as indices of `ScanPlan.dependent_chunks`.
        state_order: for each node of the forest its index among all gathered states.
        map_order: for each non-root of the forest its index among all gathered maps.
        forest: all boundary states.
        entering_states: for each of `ScanPlan.dependent_chunks` the boundary state that enters its tree.
        final_states: for each row the boundary state after its last token.
    """

    state_counts: tuple[int, ...]
    map_counts: tuple[int, ...]
    own_state_chunks: Tensor
    own_map_chunks: Tensor
    state_order: Tensor
    map_order: Tensor
    forest: Forest
    entering_states: Tensor
    final_states: Tensor


@dataclass(frozen=True, eq=False)
class ScanPlan:
    """One rank's part of a scan. Local tokens are numbered over all rows of the batch, row by row.

    Args:
        tokens: [chunks * chunk_size], the local token in each slot of the chunks; slots of padding have any token.
            Chunks are in the order of `forest`.
        chunk_size: number of slots of a chunk.
        padding: bool [chunks, 1, chunk_size, 1], True for slots without a token; None if there are none.
        slots: for each local token its index in `tokens`.
        forest: this rank's chunks.
        first_chunks, first_rows: the chunks that start at position 0, which are roots, and their rows.
        dependent_chunks: chunks of dependent trees, in the order of `forest`.
        dependent_forest: these chunks as a forest.
        exchange: None on one rank.
        last_chunks: on one rank, the chunk with the last token of each row; empty on several.
    """

    tokens: Tensor
    chunk_size: int
    padding: Tensor | None
    slots: Tensor
    forest: Forest
    first_chunks: Tensor
    first_rows: Tensor
    dependent_chunks: Tensor
    dependent_forest: Forest
    exchange: StateExchange | None
    last_chunks: Tensor


class RunChunks(NamedTuple):
    """The chunks of one rank in depth order.

    Args:
        size: tokens of a chunk; the last chunk of a run may have fewer.
        runs, starts, parents: for each chunk the index of its run, its first position and its parent, or -1.
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
        # The least power of 2 that holds the longest run: kernels halve chunks, and larger chunks would be padding.
        size = min(max_chunk, 1 << (longest - 1).bit_length())
        # Runs are listed after their previous runs, so each chunk is created after its parent.
        parents, chunk_runs, starts = list[int](), list[int](), list[int]()
        last_of_run = dict[int, int]()
        for index in own_runs:
            parent = last_of_run.get(runs[index].previous, MISSING)
            for start in range(runs[index].start, runs[index].stop, size):
                parents.append(parent)
                parent = len(chunk_runs)
                chunk_runs.append(index)
                starts.append(start)
            last_of_run[index] = parent
        order = depth_order(parents)
        sorted_index = {MISSING: MISSING} | {chunk: index for index, chunk in enumerate(order)}
        return cls(
            size,
            [chunk_runs[chunk] for chunk in order],
            [starts[chunk] for chunk in order],
            [sorted_index[parents[chunk]] for chunk in order],
            {run: sorted_index[chunk] for run, chunk in last_of_run.items()},
        )

    def tokens(self, runs: Sequence[ShardRun], layout: SequenceLayout, rank: int) -> tuple[Integers, NDArray[np.bool_]]:
        """Returns (local token in each slot, True for slots that are not padding), both [chunks, size]."""
        stops = np.array([runs[run].stop for run in self.runs], dtype=np.int64)
        starts = np.array(self.starts, dtype=np.int64)
        rows = np.array([runs[run].row for run in self.runs], dtype=np.int64)
        _, first = Owners.of(layout).find(starts)
        first = (first + rows * layout.sizes[rank]).reshape(-1, 1)
        # `first` is the local index of each chunk's first token. Striped layouts are refused: spans have step 1, and
        # adjacent positions of a run have adjacent local indices.
        offsets = np.arange(self.size)
        is_token = offsets < (stops - starts).reshape(-1, 1)
        return np.where(is_token, first + offsets, first), is_token  # padding has the chunk's first token


def segments_of_rows(layout: SequenceLayout, mask: AttentionMask | None, batch: int) -> tuple[Segments, ...]:
    rows = segments_of(layout.length, mask=mask)
    if len(rows) not in (1, batch):
        raise ValueError(f"mask has segments of {len(rows)} rows; the batch has {batch}")
    return rows


# All layers of a step share a plan. The cache is small because a plan's index tensors are as long as the shard.
@lru_cache(maxsize=8)
@compat.outside_modes
def plan_scan(
    layout: SequenceLayout, rows: tuple[Segments, ...], rank: int, device: torch.device, max_chunk: int
) -> ScanPlan:
    """Returns the plan of a rank, from the segments of each batch row, in chunks of at most `max_chunk` tokens."""
    runs = _runs(layout, rows)
    roots = _tree_roots(runs)
    chunks = RunChunks.cut(runs, rank, max_chunk)
    # If the first run of a tree has a previous run, that run is on another rank.
    dependent_chunks = [chunk for chunk, run in enumerate(chunks.runs) if runs[roots[run]].previous != MISSING]
    dependent_index = {MISSING: MISSING} | {chunk: index for index, chunk in enumerate(dependent_chunks)}
    # A subset of chunks in depth order that contains whole trees is in depth order itself.
    dependent_forest = Forest.of([dependent_index[chunks.parents[chunk]] for chunk in dependent_chunks], device)
    first_chunks = [chunk for chunk, run in enumerate(chunks.runs) if chunks.starts[chunk] == runs[run].start == 0]
    exchange, last_chunks = None, list[int]()
    if layout.shards == 1:
        last_chunks = [chunks.last_of_run[index] for index, run in enumerate(runs) if run.stop == layout.length]
    else:
        entering_runs = [runs[roots[chunks.runs[chunk]]].previous for chunk in dependent_chunks]
        exchange = _exchange(runs, roots, layout, rank, chunks, dependent_index, entering_runs, device)
    tokens, is_token = chunks.tokens(runs, layout, rank)
    # The inverse of `tokens`: the slot of each local token.
    slots = np.empty(len(rows) * layout.sizes[rank], dtype=np.int64)
    slots[tokens[is_token]] = np.flatnonzero(is_token)
    return ScanPlan(
        torch.from_numpy(tokens.reshape(-1)).to(device),
        chunks.size,
        None if is_token.all() else torch.from_numpy(~is_token).view(-1, 1, chunks.size, 1).to(device),
        torch.from_numpy(slots).to(device),
        Forest.of(chunks.parents, device),
        _indices(first_chunks, device),
        _indices([runs[chunks.runs[chunk]].row for chunk in first_chunks], device),
        _indices(dependent_chunks, device),
        dependent_forest,
        exchange,
        _indices(last_chunks, device),
    )


def _runs(layout: SequenceLayout, rows: tuple[Segments, ...]) -> list[ShardRun]:
    """Returns the runs of all ranks by row and position, so that a run is listed after its previous run."""
    # The runs of a row are computed once for all rows with equal segments. There, indices of previous runs count from
    # the row's first run.
    runs, by_segments = list[ShardRun](), dict[Segments, list[tuple[int, int, int, int]]]()
    for row, segments in enumerate(rows):
        if segments not in by_segments:
            spans = sorted(
                (run.start, run.stop, shard)
                for shard, shard_spans in enumerate(layout.spans_by_shard)
                for run in segments.runs(shard_spans)
            )
            previous_tokens = segments.ancestors(np.array([start for start, *_ in spans]), 1)
            run_ending_at = {stop - 1: index for index, (_, stop, _) in enumerate(spans)}
            by_segments[segments] = [
                (shard, start, stop, run_ending_at.get(token, MISSING))
                for (start, stop, shard), token in zip(spans, previous_tokens.tolist(), strict=True)
            ]
        offset = len(runs)
        runs += [
            ShardRun(shard, row, start, stop, previous if previous == MISSING else previous + offset)
            for shard, start, stop, previous in by_segments[segments]
        ]
    return runs


def _tree_roots(runs: Sequence[ShardRun]) -> list[int]:
    # A tree is on one rank: its root has no previous run, or one on another rank.
    roots = list[int]()
    for index, run in enumerate(runs):
        same_rank = run.previous != MISSING and runs[run.previous].rank == run.rank
        roots.append(roots[run.previous] if same_rank else index)
    return roots


def exchange_counts(layout: SequenceLayout, rows: tuple[Segments, ...]) -> tuple[list[int], list[int]]:
    """Returns the numbers of states and of maps that each rank sends, as in `StateExchange`."""
    runs = _runs(layout, rows)
    roots, boundary_runs = _tree_roots(runs), _boundary_runs(runs, layout.length)
    map_runs = [run for run in boundary_runs if runs[roots[run]].previous != MISSING]
    state_ranks, map_ranks = [runs[run].rank for run in boundary_runs], [runs[run].rank for run in map_runs]
    ranks = range(layout.shards)
    return [state_ranks.count(rank) for rank in ranks], [map_ranks.count(rank) for rank in ranks]


def _boundary_runs(runs: Sequence[ShardRun], length: int) -> list[int]:
    """Returns the runs with a boundary state: a run of another rank continues them, or a row ends."""
    continued = {run.previous for run in runs if run.previous != MISSING and runs[run.previous].rank != run.rank}
    return sorted(continued | {index for index, run in enumerate(runs) if run.stop == length})


def _exchange(
    runs: Sequence[ShardRun],
    roots: Sequence[int],
    layout: SequenceLayout,
    rank: int,
    chunks: RunChunks,
    dependent_index: dict[int, int],
    entering_runs: Sequence[int],
    device: torch.device,
) -> StateExchange:
    # Runs are those of all ranks. `roots` has the first run of each run's tree, `dependent_index` the number of each
    # dependent chunk, `entering_runs` the run of another rank that its tree continues.
    last_runs = [index for index, run in enumerate(runs) if run.stop == layout.length]
    # In the order of runs, parents precede their children.
    boundary_runs = _boundary_runs(runs, layout.length)
    boundary_index = {run: index for index, run in enumerate(boundary_runs)}
    parents = [boundary_index.get(runs[roots[run]].previous, MISSING) for run in boundary_runs]
    order = depth_order(parents)
    sorted_index = {MISSING: MISSING} | {index: node for node, index in enumerate(order)}
    forest = Forest.of([sorted_index[parents[index]] for index in order], device)
    forest_runs = [boundary_runs[index] for index in order]

    # An all-gather returns tensors in the order of ranks. `sorted` is stable, so tensors of one rank stay in run order.
    state_runs = sorted(boundary_runs, key=lambda run: runs[run].rank)
    map_runs = [run for run in state_runs if runs[roots[run]].previous != MISSING]
    gathered_state = {run: index for index, run in enumerate(state_runs)}
    gathered_map = {run: index for index, run in enumerate(map_runs)}
    own_state_runs = [run for run in state_runs if runs[run].rank == rank]
    own_map_runs = [run for run in map_runs if runs[run].rank == rank]
    ranks = range(layout.shards)
    return StateExchange(
        tuple(sum(runs[run].rank == peer for run in state_runs) for peer in ranks),
        tuple(sum(runs[run].rank == peer for run in map_runs) for peer in ranks),
        _indices([chunks.last_of_run[run] for run in own_state_runs], device),
        _indices([dependent_index[chunks.last_of_run[run]] for run in own_map_runs], device),
        _indices([gathered_state[run] for run in forest_runs], device),
        _indices([gathered_map[run] for run in forest_runs[forest.sizes[0] :]], device),
        forest,
        _indices([sorted_index[boundary_index[run]] for run in entering_runs], device),
        _indices([sorted_index[boundary_index[run]] for run in last_runs], device),
    )


def _indices(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)
