"""One step: the loss of a global batch, its gradients, and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.data import Batch
from armillary.models import linear_token_loss
from armillary.train.build import Run
from armillary.train.optimizer import clip_gradients, learning_rate, set_learning_rate


@dataclass(frozen=True)
class StepResult:
    """Loss and gradient norm (before clipping) over all ranks. A step that is not `good` has changed no weights."""

    loss: float
    grad_norm: float

    @property
    def good(self) -> bool:
        return isfinite(self.loss) and isfinite(self.grad_norm)


def train_step(run: Run, step: int, batches: list[Batch]) -> StepResult:
    """One optimizer step on one global batch, which comes in parts that are held one after the other.

    The loss is the sum over all labelled tokens of all parts and ranks, divided by their number: gradients are summed,
    and neither meshes nor parts change them. A loss or norm that is not finite leaves the weights as they are.
    """
    rate = learning_rate(step, run.config.train.steps, run.config.optimizer)
    set_learning_rate(run.optimizer, rate)
    labelled = summed(run, sum(batch.labelled for batch in batches))
    loss = torch.zeros((), device=run.device)
    for batch in batches:
        total, _ = local_loss(run, batch)
        share = total / labelled.clamp(min=1)  # padding alone has no loss
        share.backward()
        loss = loss + share.detach()
    norm = clip_gradients(run.model, run.config.optimizer.clip_norm)
    result = StepResult(summed(run, loss).item(), norm.item())
    if result.good:
        run.optimizer.step()
    run.optimizer.zero_grad()
    return result


def local_loss(run: Run, batch: Batch) -> tuple[Tensor, Tensor]:
    """(sum of the losses of this rank's labelled tokens, their number)."""
    tokens, labels = batch.tokens.to(run.device), batch.labels.to(run.device)
    # Counted from the start of the row they are the same in each.
    positions = (batch.positions if run.config.data.reset_positions else batch.positions[0]).to(run.device)
    head = partial(linear_token_loss, labels=labels)
    return run.model(tokens, positions=positions, mask=run.mask(batch), layout=batch.layout, head=head)


def summed(run: Run, value: Tensor | int) -> Tensor:
    """`value` summed over all ranks that hold tokens; a fresh tensor."""
    total = torch.as_tensor(value, device=run.device).detach().clone()
    dist.all_reduce(total, group=run.data.group)
    return total
