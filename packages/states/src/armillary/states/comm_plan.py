"""Communication plans of layers with a state, and of moving tokens to another layout.

Their steps have sends but no pairs: the kernels of these layers take time in proportion to the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from armillary.attention import AttentionMask, CommPlan
from armillary.attention.plans import Payload, Step, all_gather, reduce_scatter, send_to_each, steps
from armillary.core import Segments, SequenceLayout, accumulation_dtype
from armillary.core.internal import Owners, check_choice
from armillary.states.scan_plan import exchange_counts, segments_of_rows

StateLayer = Literal["gated_delta_rule", "ssd"]


def state_comm_plan(
    layer: StateLayer,
    layout: SequenceLayout,
    *,
    heads: int,
    key_dim: int,
    value_dim: int,
    batch: int = 1,
    mask: AttentionMask | None = None,
    element_size: int = 4,
) -> CommPlan:
    """Returns the plan of a call: an all-gather of states and maps, and backward a reduce-scatter of their gradients.

    A map takes the state that enters a run of tokens to the state that leaves it (`chunks.py`).

    Args:
        layout: the shards of the sequence, not striped.
        key_dim, value_dim: dims of a state [Dk, Dv]. For `ssd` these are the state's width Ns and the head dim D.
        element_size: bytes of an element of a state: 4, or 8 in float64.

    Raises:
        ValueError: an unknown layer; a mask that layers with a state do not take, or for another number of rows.
    """
    elements = gathered_elements(
        layer, layout, heads=heads, key_dim=key_dim, value_dim=value_dim, batch=batch, mask=mask
    )
    if layout.shards == 1:
        return CommPlan((), ())
    payload, ranks = Payload(("states", "maps"), element_size), range(layout.shards)
    return CommPlan(
        steps(Step((all_gather([ranks], elements, payload),))),
        steps(Step((reduce_scatter([ranks], elements, payload),))),
    )


def gathered_elements(
    layer: StateLayer,
    layout: SequenceLayout,
    *,
    heads: int,
    key_dim: int,
    value_dim: int,
    batch: int = 1,
    mask: AttentionMask | None = None,
) -> list[int]:
    """Returns, for each rank, the elements of its states and maps, which the all-gather sends to the other ranks.

    Arguments are as in `state_comm_plan`.
    """
    layers: tuple[StateLayer, ...] = ("gated_delta_rule", "ssd")
    check_choice("layer", layer, layers)
    rows = segments_of_rows(layout, mask, batch)
    if layout.shards == 1:
        return [0]
    state_counts, map_counts = exchange_counts(layout, rows * (batch // len(rows)))
    # The map of a state is a factor per head in SSD, and a matrix [Dk, Dk] per head in the gated delta rule.
    state_size, map_size = heads * key_dim * value_dim, heads * (1 if layer == "ssd" else key_dim**2)
    return [states * state_size + maps * map_size for states, maps in zip(state_counts, map_counts, strict=True)]


def halo_comm_plan(
    layout: SequenceLayout,
    left: int,
    channels: int,
    dtype: torch.dtype,
    batch: int = 1,
    mask: AttentionMask | None = None,
) -> CommPlan:
    """Returns the plan of `halo`, or of `short_convolution` of width W with left = W - 1.

    Raises:
        ValueError: a mask that layers with a state do not take, or for another number of rows.
    """
    rows = segments_of_rows(layout, mask, batch)
    counts = _halo_tokens(layout, rows, left)
    elements = channels * (batch // len(rows))  # all rows of the batch may share one row of segments
    # Backward returns gradients in the accumulation dtype, because the owner of a token adds its own gradient to them.
    forward_move = _all_to_all(counts, elements * dtype.itemsize)
    backward_move = _all_to_all(counts.T, elements * accumulation_dtype(dtype).itemsize)
    return CommPlan(steps(forward_move), steps(backward_move))


def relayout_comm_plan(source: SequenceLayout, target: SequenceLayout, token_bytes: int) -> CommPlan:
    """Returns the plan of `relayout` from one layout to another, and back with the gradients in backward.

    Args:
        token_bytes: bytes of one position, over all rows of the batch and all channels.

    Raises:
        ValueError: layouts of different lengths or numbers of shards.
    """
    if source.length != target.length or source.shards != target.shards:
        raise ValueError(f"source {source} and target {target}: the same length and number of shards are needed")
    counts = _token_counts(source, target)
    forward_move, backward_move = (_all_to_all(matrix, token_bytes) for matrix in (counts, counts.T))
    return CommPlan(steps(forward_move), steps(backward_move))


def _token_counts(source: SequenceLayout, target: SequenceLayout) -> np.ndarray:
    """Returns counts [P, P]: rank a sends counts[a, b] tokens to rank b."""
    owners, new_owners = Owners.of(source), Owners.of(target)
    # Spans of both layouts cut the sequence into runs; all tokens of a run move from one rank to one rank.
    starts = np.union1d(owners.starts, new_owners.starts)
    (source_ranks, _), (target_ranks, _) = owners.find(starts), new_owners.find(starts)
    counts = np.zeros((source.shards, source.shards), dtype=np.int64)
    np.add.at(counts, (source_ranks, target_ranks), np.diff(starts, append=source.length))
    np.fill_diagonal(counts, 0)
    return counts


def _halo_tokens(layout: SequenceLayout, rows: Sequence[Segments], left: int) -> np.ndarray:
    """Returns counts [P, P]: rank b needs counts[a, b] tokens of rank a before its runs. A token counts once."""
    owners, counts = Owners.of(layout), np.zeros((layout.shards, layout.shards), dtype=np.int64)
    for target in range(layout.shards):
        for row in rows:
            starts = np.array([run.start for run in row.runs(layout.spans(target))], dtype=np.int64)
            # In a tree, the tokens before a run are on the path to it. -1 stands for a token before the path's first.
            before = [row.ancestors(starts, distance) for distance in range(1, left + 1)]
            positions = np.unique(np.concatenate([starts[:0], *before]))  # starts[:0] is empty: `before` may be too
            sources, _ = owners.find(positions[positions >= 0])
            counts[:, target] += np.bincount(sources, minlength=layout.shards)
    np.fill_diagonal(counts, 0)
    return counts


def _all_to_all(counts: np.ndarray, token_bytes: int) -> Step:
    ranks: Sequence[int] = range(len(counts))
    payload = Payload(("x",), token_bytes)
    return Step((send_to_each("all_to_all", "ring", [ranks], payload, lambda a, b: int(counts[a, b])),))
