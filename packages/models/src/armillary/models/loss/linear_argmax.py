"""The most likely next tokens at labelled positions, without logits [T, V]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import Axis, start_all_gather
from armillary.models.dtensors import sums_dtensors
from armillary.models.layers.interleaved import all_gather_interleaved
from armillary.models.loss.chunk_labels import token_labels
from armillary.models.loss.linear_loss import check, chunk_rows
from armillary.models.loss.vocabulary_shard import VocabularyShard


@sums_dtensors
@torch.no_grad()
def linear_argmax(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore: int = -100,
    axis: DeviceMesh | Axis | None = None,
    vocabulary: int | None = None,
) -> Tensor:
    """Returns the token with the largest logit at each label, `ignore` elsewhere: int64 [B, T]; fits a model's `head`.

    Logits are computed only at labels, `chunk_rows` at a time. Ties go to the first token. Arguments as in
    `linear_token_loss`; with an axis the result is the same on all its ranks.

    Bytes sent over R ranks, kind "all_gather": (R - 1) n E e for n tokens of each rank, and 2 w (R - 1) for each label.

    Raises:
        ValueError: shapes or dtypes that do not match, or rows that are not this rank's part of `vocabulary`. Raised
            before any communication.
    """
    ranks = 1 if axis is None else Axis.of(axis).size
    check(hidden, weight, token_labels(labels, ignore, ranks).shape, None, None, ranks)
    rows = VocabularyShard.of(len(weight), axis, vocabulary)
    is_labelled = labels != ignore
    if not rows.alone:
        hidden = all_gather_interleaved(hidden, rows.axis)[:, : labels.shape[1]]
    labelled_hidden = hidden[is_labelled]
    chunk = chunk_rows(len(labelled_hidden), hidden.shape[-1], rows.total_rows, hidden.element_size(), ranks)
    tokens = [most_likely(chunk_hidden, weight, rows) for chunk_hidden in labelled_hidden.split(chunk)]
    return torch.full_like(labels, ignore, dtype=torch.int64).masked_scatter(is_labelled, torch.cat(tokens))


def most_likely(hidden: Tensor, weight: Tensor, rows: VocabularyShard) -> Tensor:
    """Returns the most likely token of all ranks' rows for each of hidden [C, E]: int64 [C]."""
    logits = F.linear(hidden, weight)
    if rows.alone:
        return logits.argmax(1)
    if not len(weight):  # a rank without rows takes part in the gather, and never wins
        logits = logits.new_full((len(hidden), 1), -torch.inf)
    best = logits.max(1)
    # Logit and token in one message: float64 represents token ids exactly.
    own_best = torch.stack([best.values.double(), (best.indices + rows.first).double()], 1).unsqueeze(0)
    values, tokens = start_all_gather(own_best, rows.axis, [1] * rows.axis.size, 0).wait().unbind(2)
    return tokens.gather(0, values.argmax(0, keepdim=True)).squeeze(0).long()
