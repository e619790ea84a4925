"""Labels of completions in packed trees, in which a prompt is stored once and followed by its completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from armillary.attention.mask import AttentionMask
from armillary.core import Segments, SequenceLayout
from armillary.core.parts import MISSING, check_tensor


class CompletionLabels(NamedTuple):
    """The M labels that tokens of one rank predict. A label that is in several sequences is listed once for each.

    A sequence is a path from a root to a leaf, with a trained segment. Sequences are numbered in order of their leaves.
    """

    positions: Tensor
    """Integers [M] on the CPU: b T + t for the local token t of row b that predicts the label."""
    labels: Tensor
    """Integers [M] on the device of ids: the token ids to predict."""
    sequences: Tensor
    """Integers [M] on the device of ids: the number of the label's sequence."""
    sequence_count: int
    """Number of sequences of all rows."""


def completion_labels(
    ids: Tensor,
    mask: AttentionMask,
    layout: SequenceLayout | None = None,
    shard: int = 0,
    *,
    trained: Sequence[Sequence[bool]] | None = None,
) -> CompletionLabels:
    """Returns the labels of this rank's tokens, for `token_logprobs` and `segment_sum`.

    The last token of a prompt predicts the first token of each of its completions, so one position may have several
    labels. A prompt with a single completion is a tree of two segments. Padding is a tree of one segment.

    Args:
        ids: [B, N], whole rows.
        mask: `AttentionMask.tree`, or `rows` of them. A document is a tree of one segment, a root.
        layout: layout of the sequence over all ranks of the method; one shard by default.
        shard: this rank's shard of the layout.
        trained: for each row one boolean per segment, True if the segment's tokens are labels. By default True for all
            segments except roots.

    Raises:
        ValueError: ids that are not [B, N]; a mask without `segments`, or with another number of rows; a layout of
            another length; `trained` with another number of rows or segments.
    """
    check_tensor("ids", ids)
    if ids.ndim != 2:
        raise ValueError(f"ids {tuple(ids.shape)}: whole rows [B, N] are needed")
    rows, length = ids.shape
    layout = SequenceLayout.contiguous(length, 1) if layout is None else layout
    if layout.length != length:
        raise ValueError(f"layout={layout}: its length differs from that of ids, {length}")
    segments = mask.segments(length)
    if len(segments) not in (1, rows):
        raise ValueError(f"mask has {len(segments)} rows, ids have {rows}")
    segments = segments * rows if len(segments) == 1 else segments
    if trained is not None and len(trained) != rows:
        raise ValueError(f"trained has {len(trained)} rows, ids have {rows}")
    own_positions = layout.positions(shard).numpy()
    local_index = np.full(length, MISSING)  # of each position of a row; MISSING on other ranks
    local_index[own_positions] = np.arange(len(own_positions))
    entries, count = [np.empty((0, 3), dtype=np.int64)], 0
    for row, tree in enumerate(segments):
        is_trained = [parent != MISSING for parent in tree.parents] if trained is None else list(trained[row])
        if len(is_trained) != len(tree.parents):
            raise ValueError(f"trained[{row}] has {len(is_trained)} entries for {len(tree.parents)} segments")
        numbers = _sequence_numbers(tree, is_trained, count)
        count += len({number for segment_numbers in numbers for number in segment_numbers})
        for segment in (segment for segment, is_label in enumerate(is_trained) if is_label):
            tokens = np.arange(tree.ends[segment], tree.ends[segment + 1])
            predictors = tree.ancestors(tokens, 1)
            # A root's first token has no predictor, and another rank may have the token that predicts.
            is_local = (predictors != MISSING) & (local_index[predictors] != MISSING)
            tokens, predictors = tokens[is_local], predictors[is_local]
            # Indices over all rows: of the predicting token among local tokens, of the label in the flattened ids.
            columns = [row * len(own_positions) + local_index[predictors], row * length + tokens]
            entries += [np.stack([*columns, np.full(len(tokens), number)], 1) for number in numbers[segment]]
    table = torch.from_numpy(np.concatenate(entries))
    labels = ids.flatten()[table[:, 1].to(ids.device)].long()
    return CompletionLabels(table[:, 0], labels, table[:, 2].to(ids.device), count)


def _sequence_numbers(tree: Segments, trained: Sequence[bool], first: int) -> list[list[int]]:
    """Returns the numbers, from `first` on, of the sequences that contain each segment.

    Paths without a trained segment have no number.
    """
    numbers: list[list[int]] = [[] for _ in tree.parents]
    leaves = sorted({*range(len(tree.parents))} - {*tree.parents})
    for leaf in leaves:
        path, segment = list[int](), leaf
        while segment != MISSING:
            path.append(segment)
            segment = tree.parents[segment]
        if any(trained[segment] for segment in path):
            for segment in path:
                numbers[segment].append(first)
            first += 1
    return numbers
