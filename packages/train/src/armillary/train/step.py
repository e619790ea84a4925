"""One step: the loss of a global batch, its gradients, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.core import clip_gradients, to_device
from armillary.data import Batch
from armillary.models import linear_token_loss
from armillary.models.parallel import begin_micro_batch
from armillary.train.lr_schedule import learning_rate
from armillary.train.run import Run


@dataclass(frozen=True)
class StepResult:
    """Loss and gradient norm (before clipping) over all ranks. A step that is not `good` changed no weights."""

    loss: float
    grad_norm: float

    @property
    def good(self) -> bool:
        return isfinite(self.loss) and isfinite(self.grad_norm)


def train_step(run: Run, step: int, batches: list[Batch]) -> StepResult:
    """Takes one optimizer step on one global batch, given as micro-batches.

    The loss is the sum over all labelled tokens of all micro-batches and ranks, divided by their number, or by the sum
    of their weights: gradients are sums, independent of mesh and accumulation. A loss or norm that is not finite leaves
    the weights unchanged.
    """
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(step, run.config.train.steps, run.config.optimizer)
    # 1. The global number of labels, before any backward: the divisor of every micro-batch's loss.
    label_count = sum_over_ranks(run, sum(batch.labelled for batch in batches))
    label_count = label_count.where(label_count > 0, 1)  # a batch of padding has no loss
    # 2. Gradients add up over micro-batches here, and over ranks in FSDP2's reduce-scatter.
    losses = list[Tensor]()
    for i, batch in enumerate(batches):
        if run.config.parallel.zero_stage == 1:
            begin_micro_batch(run.model, last=i == len(batches) - 1)
        losses.append(backward(run, batch, label_count))
    norm = clip_gradients(run.model, run.config.optimizer.clip_norm)
    result = StepResult(sum_over_ranks(run, torch.stack(losses).sum()).item(), norm.item())
    # 3. Every rank has the same loss and norm, so all ranks decide alike.
    if result.good:
        run.optimizer.step()
    run.optimizer.zero_grad()
    return result


def backward(run: Run, batch: Batch, label_count: Tensor) -> Tensor:
    """Accumulates the gradients of a micro-batch; returns its share of the loss on this rank."""
    total, _ = local_loss(run, batch)
    loss_share = total / label_count.to(total.dtype)
    loss_share.backward()
    return loss_share.detach()


def local_loss(run: Run, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns (sum of the losses of this rank's labelled tokens, their number or sum of weights)."""
    return forward(run, batch, linear_token_loss)


def forward(run: Run, batch: Batch, head: Callable[..., Any]) -> Any:
    """Calls the model on this rank's tokens of a batch and `head(hidden, weight, labels=...)` on its hidden states.

    Tokens, labels and activations are local tensors; parameters and their gradients are DTensors.
    """
    labels = to_device(batch.labels, run.device) if isinstance(batch.labels, Tensor) else batch.labels.to(run.device)
    # Positions from the start of the row are equal in all rows: [T] instead of [B, T].
    by_row = run.config.data.reset_positions or batch.parents is not None
    return run.model(
        to_device(batch.tokens, run.device),
        positions=to_device(batch.positions if by_row else batch.positions[0], run.device),
        mask=run.mask(batch),
        layout=batch.layout,
        head=partial(head, labels=labels),
    )


def sum_over_ranks(run: Run, value: Tensor | float) -> Tensor:
    """Sums a value over all ranks with tokens of the step; each rank has a share."""
    # `full` on the device: copying a number there would make the host wait.
    dtype = torch.float64 if isinstance(value, float) else None
    local_value = value.clone() if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=run.device)
    dist.all_reduce(local_value, group=run.data.group)
    return local_value
