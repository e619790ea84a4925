"""The most likely next token at each position that has a label, without logits [T, V]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import Axis, start_all_gather
from armillary.models.layers.interleaved import all_gather_interleaved
from armillary.models.loss.chunk_labels import token_labels
from armillary.models.loss.linear_loss import check, loss_chunk_tokens
from armillary.models.loss.vocabulary_shard import VocabularyShard


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
    """Returns the token with the largest logit at each position with a label, `ignore` elsewhere: int64 [B, T].

    Can be passed as a model's `head`. Logits are computed only at positions with a label, `loss_chunk_tokens` at a
    time. Of several tokens with the largest logit, the first is taken. Arguments as in `linear_token_loss`; with an
    axis the result is the same on all its ranks.

    Bytes sent by each of R ranks, kind "all_gather": (R - 1) n E e for its n tokens, and (R - 1) 16 for each label.

    Raises:
        ValueError: `hidden` or `labels` is a DTensor (pass its `to_local()`), shapes or dtypes do not match, labels are
            not integers, `vocabulary` is missing with an axis, or the number of rows is not this rank's part of it.
            Raised before any communication.
    """
    ranks = 1 if axis is None else Axis.of(axis).size
    check(hidden, weight, token_labels(labels, ignore).shape, None, None, ranks)
    shard = VocabularyShard.of(len(weight), axis, vocabulary)
    has_label = labels != ignore
    if not shard.alone:
        hidden = all_gather_interleaved(hidden, shard.axis)[:, : labels.shape[1]]
    label_hidden = hidden[has_label]  # [M, E] for M labels
    chunk = loss_chunk_tokens(len(label_hidden), hidden.shape[-1], shard.total_rows, hidden.element_size(), ranks)
    tokens = [most_likely(chunk_hidden, weight, shard) for chunk_hidden in label_hidden.split(chunk)]
    return torch.full_like(labels, ignore, dtype=torch.int64).masked_scatter(has_label, torch.cat(tokens))


def most_likely(hidden: Tensor, weight: Tensor, shard: VocabularyShard) -> Tensor:
    """Returns the most likely token of the whole vocabulary for each hidden state [C, E]: int64 [C]."""
    logits = F.linear(hidden, weight)
    if shard.alone:
        return logits.argmax(1)
    if not len(weight):  # a rank without rows takes part in the gather, and never wins
        logits = logits.new_full((len(hidden), 1), -torch.inf)
    best = logits.max(1)
    # Logit and token in one message: float64 represents token ids exactly.
    own_best = torch.stack([best.values.double(), (best.indices + shard.first).double()], 1).unsqueeze(0)
    values, tokens = start_all_gather(own_best, shard.axis, [1] * shard.axis.size, 0).wait().unbind(2)
    return tokens.gather(0, values.argmax(0, keepdim=True)).squeeze(0).long()
