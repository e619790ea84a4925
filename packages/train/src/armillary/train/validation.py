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
    """Returns "loss", the mean over all tokens of held-out rows, and for each task the share of right answers.

    The first rows of each kind: the same at every call, on every mesh and with any accumulation.
    """

    def answers(batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns (number of right likeliest tokens, number of questions) of this rank."""
        return accuracy(forward(run, batch, linear_argmax), to_device(cast(Tensor, batch.labels), run.device))

    accuracies = {name: mean(run, rows, answers) for name, rows in run.tasks.items()}
    return {"loss": mean(run, run.validation, lambda batch: local_loss(run, batch)), **accuracies}


def mean(run: Run, rows: Batches, evaluate: Callable[[Batch], tuple[Tensor, Tensor]]) -> float:
    """Returns sum of totals / sum of counts, over all ranks and the first `validation.batches` global batches."""
    batches = range(run.config.validation.batches * run.config.train.accumulation)
    sums = [torch.stack([x.double() for x in evaluate(rows.batch(i))]) for i in batches]
    total, count = sum_over_ranks(run, torch.stack(sums).sum(0)).tolist()
    return total / (count or 1.0)
