"""Validation: the loss on held-out rows, and accuracy on synthetic long-context tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from armillary.core import to_device
from armillary.data import Batch, Batches
from armillary.data.synthetic import accuracy
from armillary.models import linear_argmax
from armillary.train.run import Run
from armillary.train.step import forward, local_loss, sum_over_ranks


@torch.no_grad()
def validate(run: Run) -> dict[str, float]:
    """Returns "loss", the mean over all labelled tokens of held-out rows, and the accuracy on each task by its name.

    Reads the first held-out rows of the text and of each task: the same at every call, accumulation and mesh, except
    that recall's depend on the mesh, because its answers are on other ranks than the questions.
    """

    def count_answers(batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns (number of questions whose most likely token is right, number of questions) of this rank."""
        return accuracy(forward(run, batch, linear_argmax), to_device(cast(Tensor, batch.labels), run.device))

    accuracies = {name: mean(run, rows, count_answers) for name, rows in run.tasks.items()}
    return {"loss": mean(run, run.validation, lambda batch: local_loss(run, batch)), **accuracies}


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
