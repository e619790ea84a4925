"""The loss as a sum, so that whoever holds the global count divides by it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def token_loss(logits: Tensor, labels: Tensor, ignore: int = -100) -> tuple[Tensor, Tensor]:
    """The sum of the cross entropies, in nats, over valid labels, and how many those are.

    A sum, because shards and ranks hold different numbers of valid labels: add up both over all ranks, then divide.
    With no valid label it is 0, with zero gradients.

    Args:
        logits: [B, T, V].
        labels: integers [B, T], shifted already: `labels[b, t]` is what `logits[b, t]` predict.
        ignore: the label that is not counted.

    Returns:
        The sum, a scalar in float32 (float64 for float64 logits), and the count, an integer scalar on the same device.

    Raises:
        ValueError: shapes that do not match.
    """
    if logits.ndim != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(
            f"logits [B, T, V] and labels [B, T] are needed; got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide, labels.flatten(), ignore_index=ignore, reduction="sum")
    return total, (labels != ignore).sum()
