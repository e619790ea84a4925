"""Looking at a model between steps: the loss on held-out rows."""

from __future__ import annotations

import torch

from armillary.train.build import Run
from armillary.train.step import local_loss, summed


@torch.no_grad()
def validate(run: Run) -> dict[str, float]:
    """By name: "loss", the mean over the first batches of the validation rows, which are the same at every call."""
    losses: list[torch.Tensor] = []
    for i in range(run.config.validation.batches):
        total, count = local_loss(run, run.validation.batch(i))
        total, count = summed(run, torch.stack([total, count.to(total.dtype)]))
        losses.append(total / count.clamp(min=1))
    return {"loss": torch.stack(losses).mean().item()}
