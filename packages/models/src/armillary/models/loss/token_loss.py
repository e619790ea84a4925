"""The sum of the tokens' cross entropies, and the number of labels to divide it by."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import Axis, LabelTriples, accumulation_dtype
from armillary.core.parts import check_local
from armillary.models.loss.chunk_labels import TokenLabels, token_labels
from armillary.models.loss.cross_entropy import cross_entropy_, pad_empty_shard, scale
from armillary.models.loss.vocabulary_shard import VocabularyShard


def token_loss(
    logits: Tensor,
    labels: Tensor | LabelTriples,
    *,
    ignore: int = -100,
    z_loss: float = 0.0,
    axis: DeviceMesh | Axis | None = None,
    vocabulary: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the sum of the cross entropies, in nats, over valid labels, and the number of valid labels.

    Sum both over all ranks, then divide: a mean per rank would be wrong, because ranks have different numbers of valid
    labels. Without valid labels the sum is 0, with zero gradients.

    Args:
        logits: [B, T, V]; with an axis [B, T, V_r], this rank's part of the vocabulary, cut as by `torch.chunk` and
            DTensor's `Shard`: ceil(V / R) entries per rank until none are left.
        labels: integers [B, T], shifted: `logits[b, t]` predict `labels[b, t]`. With an axis, the same on all ranks.
            Or `LabelTriples`, with several labels per position.
        ignore: labels with this value are not counted.
        z_loss: adds `z_loss * logsumexp(logits)**2` for each valid label (PaLM, arXiv 2204.02311).
        axis: a 1-D mesh of R ranks, over which the vocabulary is sharded. All ranks make the same call, all with
            gradients or all without.
        vocabulary: V, needed with an axis.

    Bytes sent, all in forward, with w = 4 (8 in float64). Logits are [B, T, V_r] on each rank; for the exchange each
    rank owns B T / R of the tokens: "reduce_scatter" 2 w for each token of the other ranks; "all_gather" (R - 1) w,
    and with gradients (R - 1) ceil(B T / R) w more.

    Returns:
        The sum, a scalar in float32 (float64 for float64 logits), and the count, an integer scalar on the same device.
        For triples they are the sum of weight times cross entropy, and the sum of weights in float64.

        With an axis both are bitwise equal on all ranks. It is one loss with a copy on each rank, not R losses: each
        rank calls backward with the same upstream gradient, and gets the gradient of its own logits. With an axis of
        several ranks, or with triples, backward cannot be differentiated.

    Raises:
        ValueError: `logits` or `labels` is a DTensor (pass its `to_local()`), shapes do not match, labels are not
            integers, `vocabulary` is missing with an axis, V_r is not this rank's part of it, or a label of triples is
            not below V. Raised before any communication. Other labels outside of the vocabulary are not checked on the
            host, which would have to wait for a GPU: torch's kernels report them, on every rank.
    """
    check_local("logits", logits)
    label_lookup = token_labels(labels, ignore)
    if logits.ndim != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(
            f"logits [B, T, V] and labels [B, T] are needed; got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    shard = VocabularyShard.of(logits.shape[-1], axis, vocabulary)
    if shard.alone and isinstance(labels, Tensor):
        return unsharded_loss(logits.flatten(0, 1), labels.flatten().long(), ignore, z_loss), label_lookup.count
    label_lookup.check(shard)
    needs_grad = logits.requires_grad and torch.is_grad_enabled()
    total = ShardedLoss.apply(logits.flatten(0, 1), label_lookup, shard, z_loss, needs_grad)
    return cast(Tensor, total), label_lookup.count


def unsharded_loss(logits: Tensor, labels: Tensor, ignore: int, z_loss: float) -> Tensor:
    """Returns the summed loss of logits [T, V] and labels [T]."""
    logits = logits.to(accumulation_dtype(logits.dtype))
    total = F.cross_entropy(logits, labels, ignore_index=ignore, reduction="sum")
    return total + z_loss * logits.logsumexp(1).square().where(labels != ignore, 0).sum() if z_loss else total


class ShardedLoss(torch.autograd.Function):
    """The summed loss from this rank's logits [T, V_r]. Forward also computes the gradient and saves it."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: TokenLabels, shard: VocabularyShard, z_loss: float, needs_grad: bool
    ) -> Tensor:
        padded_logits = pad_empty_shard(logits)
        # A copy of the logits in the dtype of sums, since the caller's logits must stay. `cross_entropy_` overwrites it
        # with the softmax, and then with the gradient.
        gradient = padded_logits.to(accumulation_dtype(logits.dtype), copy=True)
        gradient_buffer = gradient if needs_grad else None
        chunk = labels.of_chunk(slice(0, len(padded_logits)), shard, gradient.dtype)
        losses = cross_entropy_(gradient, padded_logits, chunk, shard, z_loss=z_loss, gradient=gradient_buffer)
        ctx.save_for_backward(gradient.narrow(1, 0, logits.shape[1]) if needs_grad else None)
        ctx.dtype = logits.dtype
        return shard.total(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return scale(ctx.saved_tensors[0], grads[0], ctx.dtype), *[None] * 4
