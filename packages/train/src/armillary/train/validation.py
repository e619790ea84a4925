"""Validation: the loss on held-out rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from armillary.data import Batch, Batches
from armillary.train.run import Run
from armillary.train.step import local_loss, sum_over_ranks


@torch.no_grad()
def validate(run: Run) -> dict[str, float]:
    """Returns "loss", the mean over all labelled tokens of the first held-out rows.

    These rows are the same at every call, accumulation and mesh.
    """
    return {"loss": mean(run, run.validation, lambda batch: local_loss(run, batch))}


def mean(run: Run, rows: Batches, evaluate: Callable[[Batch], tuple[Tensor, Tensor]]) -> float:
    """Returns the sum of totals divided by the sum of counts, of the first `validation.batches` global batches.

    Args:
        evaluate: returns (total, count) of this rank's tokens of a micro-batch. Both are summed over all ranks.
    """
    micro_batches = range(run.config.validation.batches * run.config.train.accumulation)
    # Sums stay on the device until the end, so that the host queues the next micro-batch meanwhile.
    sums = [torch.stack([x.double() for x in evaluate(rows.batch(i))]) for i in micro_batches]
    total, count = sum_over_ranks(run, torch.stack(sums).sum(0)).tolist()
    return total / (count or 1.0)  # rows of padding have no labels
