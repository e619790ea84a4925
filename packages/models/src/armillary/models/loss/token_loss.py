"""The token loss as a sum, to be divided by the global count."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import Axis
from armillary.core.accumulate import accumulation_dtype
from armillary.core.labels import LabelTriples
from armillary.models.dtensors import sums_dtensors
from armillary.models.loss.chunk_labels import TokenLabels, token_labels
from armillary.models.loss.cross_entropy import at_least_one, cross_entropy_, scaled
from armillary.models.loss.vocabulary_shard import VocabularyShard


@sums_dtensors
def token_loss(
    logits: Tensor,
    labels: Tensor | LabelTriples,
    *,
    ignore: int = -100,
    z_loss: float = 0.0,
    axis: DeviceMesh | Axis | None = None,
    vocabulary: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum of the cross entropies, in nats, over valid labels, and how many those are.

    A sum, because shards and ranks hold different numbers of valid labels: add up both over all ranks, then divide.
    With no valid label it is 0, with zero gradients.

    Args:
        logits: [B, T, V]; with an axis [B, T, V_r], this rank's part of the vocabulary, cut as `torch.chunk` and
            DTensor's `Shard` cut: ceil(V / R) of it each while there is any.
        labels: integers [B, T], shifted already: `labels[b, t]` is what `logits[b, t]` predict. With an axis the same
            on all its ranks. Or `LabelTriples` of the tokens, of which a position may have several labels.
        ignore: the label that is not counted.
        z_loss: adds `z_loss * logsumexp(logits)**2` for each valid label (PaLM, arXiv 2204.02311).
        axis: a 1-D mesh of R ranks, over which the vocabulary is cut. All must make the same call, and all want
            gradients or none.
        vocabulary: V, needed with an axis.

    Bytes sent, all in forward, with w = 4, in float64 8: "reduce_scatter" 2 w for each of B T tokens but this rank's
    share, which is a Rth of them; "all_gather" (R - 1) w and, if gradients are wanted, (R - 1) ceil(B T / R) w.

    Returns:
        The sum, a scalar in float32 (float64 for float64 logits), and the count, an integer scalar on the same device.
        Of triples both count weights: the sum of weight times cross entropy, and the sum of weights, in float64.

        With an axis both are the same on all its ranks, to the bit. It is one loss of which each rank has a copy, not
        R losses: each rank calls backward with the same upstream gradient, and gets that loss's by its own logits.
        Then backward cannot be differentiated itself.

    Raises:
        ValueError: shapes that do not match, or logits that are not this rank's part of `vocabulary`. Raised before
            any communication.
    """
    if logits.ndim != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(
            f"logits [B, T, V] and labels [B, T] are needed; got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    rows, found = VocabularyShard.of(logits.shape[-1], axis, vocabulary), token_labels(labels, ignore)
    if rows.alone and isinstance(labels, Tensor):
        return whole_loss(logits.flatten(0, 1), labels.flatten(), ignore, z_loss), found.count
    found.check(rows)
    wanted = logits.requires_grad and torch.is_grad_enabled()
    total = PartLoss.apply(logits.flatten(0, 1), found, rows, z_loss, wanted)
    return cast(Tensor, total), found.count


def whole_loss(logits: Tensor, labels: Tensor, ignore: int, z_loss: float) -> Tensor:
    """Computes the sum for logits [T, V] and labels [T]."""
    logits = logits.to(accumulation_dtype(logits.dtype))
    total = F.cross_entropy(logits, labels, ignore_index=ignore, reduction="sum")
    return total + z_loss * logits.logsumexp(1).square().where(labels != ignore, 0).sum() if z_loss else total


class PartLoss(torch.autograd.Function):
    """The sum for this rank's part [T, V_r] of all logits. The gradient is computed in forward, and saved."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: TokenLabels, vocabulary: VocabularyShard, z_loss: float, wanted: bool
    ) -> Tensor:
        mine = at_least_one(logits)
        gradient = mine.to(accumulation_dtype(logits.dtype), copy=True)
        into = gradient if wanted else None
        chunk = labels.of_chunk(slice(0, len(mine)), vocabulary, gradient.dtype)
        losses = cross_entropy_(gradient, mine, chunk, vocabulary, z_loss=z_loss, gradient=into)
        ctx.save_for_backward(gradient.narrow(1, 0, logits.shape[1]) if wanted else None)
        ctx.dtype = logits.dtype
        return vocabulary.total(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return scaled(ctx.saved_tensors[0], grads[0], ctx.dtype), *[None] * 4
