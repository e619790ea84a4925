"""Validation: the loss on held-out rows, and accuracy on synthetic long-context tasks."""

from __future__ import annotations

from collections.abc import Generator
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
    answers = {name: right_answers(run, rows) for name, rows in run.tasks.items()}
    return {"loss": mean_loss(run), **answers}


def mean_loss(run: Run) -> float:
    losses = [torch.stack([x.double() for x in local_loss(run, batch)]) for batch in batches_of(run, run.validation)]
    total, count = sum_over_ranks(run, torch.stack(losses).sum(0)).tolist()
    return total / (count or 1.0)


def right_answers(run: Run, rows: Batches) -> float:
    """Returns the share of all ranks' questions whose likeliest token is the answer."""
    counts = [
        torch.stack(accuracy(forward(run, batch, linear_argmax), to_device(cast(Tensor, batch.labels), run.device)))
        for batch in batches_of(run, rows)
    ]
    correct, questions = sum_over_ranks(run, torch.stack(counts).sum(0)).tolist()
    return correct / questions


def batches_of(run: Run, rows: Batches) -> Generator[Batch]:
    """Yields the micro-batches of the first `validation.batches` global batches."""
    for i in range(run.config.validation.batches * run.config.train.accumulation):
        yield rows.batch(i)
