"""One step: the loss of a global batch, its gradients, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.utils import _pytree as pytree

from armillary.core.gradients import clip_gradients
from armillary.core.labels import LabelTriples
from armillary.core.placements import local_of
from armillary.core.to_device import to_device
from armillary.data import Batch
from armillary.models import linear_token_loss
from armillary.train.lr_schedule import learning_rate
from armillary.train.optimizer import set_learning_rate
from armillary.train.run import Run


@dataclass(frozen=True)
class StepResult:
    """Loss and gradient norm (before clipping) over all ranks. A step that is not `good` has changed no weights.

    Args:
        bad_rows: of a bad step, by rank, the numbers of rows whose tokens there have no finite loss.
    """

    loss: float
    grad_norm: float
    bad_rows: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    @property
    def good(self) -> bool:
        return isfinite(self.loss) and isfinite(self.grad_norm)


def train_step(run: Run, step: int, batches: list[Batch]) -> StepResult:
    """One optimizer step on one global batch, which comes in micro-batches.

    The loss is the sum over all labelled tokens of all micro-batches and ranks, divided by their number, or by the sum
    of their weights: gradients are summed, and depend on neither mesh nor accumulation. A non-finite loss or norm
    leaves the model's weights unchanged.
    """
    set_learning_rate(run.optimizer, learning_rate(step, run.config.train.steps, run.config.optimizer))
    labelled = summed(run, sum(batch.labelled for batch in batches))
    labelled = labelled.where(labelled > 0, 1)  # padding alone has no loss
    losses = [backward(run, batch, labelled) for batch in batches]
    norm = clip_gradients(run.model, run.config.optimizer.clip_norm)
    result = StepResult(summed(run, torch.stack(losses).sum()).item(), norm.item())
    if result.good:
        run.optimizer.step()
    else:
        result = replace(result, bad_rows=bad_rows(run, batches))
    run.optimizer.zero_grad()
    return result


def backward(run: Run, batch: Batch, labelled: Tensor) -> Tensor:
    """Accumulates the gradients of a micro-batch; returns its share of the loss on this rank."""
    total, _ = local_loss(run, batch)
    share = total / labelled.to(total.dtype)
    share.backward()
    return share.detach()


@torch.no_grad()
def bad_rows(run: Run, batches: list[Batch]) -> dict[int, list[int]]:
    """By rank, the rows whose loss is not finite there, evaluated one by one. Every rank must call it."""
    parts = [batch.of_row(i) for batch in batches for i in range(len(batch.rows))]
    mine = [part.rows.start for part in parts if not local_loss(run, part)[0].isfinite()]
    found: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    return {rank: rows for rank, rows in enumerate(found) if rows}


def local_loss(run: Run, batch: Batch) -> tuple[Tensor, Tensor]:
    """(sum of the losses of this rank's labelled tokens, their number)."""
    return forward(run, batch, linear_token_loss)


def forward(run: Run, batch: Batch, head: Callable[..., Any]) -> Any:
    """`head(hidden, weight, labels=...)` on the model's hidden states: this rank's part, or its shares of sums."""
    tokens, labels = (placed(run, x, batch) for x in (batch.tokens, batch.labels))
    # Counted from the start of the row they are the same in each.
    own = run.config.data.reset_positions or batch.parents is not None
    positions = batch.positions if own else batch.positions[0]
    positions = to_device(positions, run.device)
    head = partial(head, labels=labels)
    found = run.model(tokens, positions=positions, mask=run.mask(batch), layout=batch.layout, head=head)
    return pytree.tree_map_only(DTensor, local_of, found)


def placed(run: Run, x: Tensor | LabelTriples, batch: Batch) -> Tensor | LabelTriples:
    """Tokens or labels of a batch on the device. Triples are those of this rank's tokens, on any mesh."""
    if isinstance(x, LabelTriples):
        return x.to(run.device)
    return run.placed(to_device(x, run.device), batch.layout)


def summed(run: Run, value: Tensor | float) -> Tensor:
    """`value`, of which all ranks that hold tokens have a share, summed over them."""
    # Filled in there: made here and copied, it would have the host wait for the device.
    dtype = torch.float64 if isinstance(value, float) else None
    share = value.detach() if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=run.device)
    return DTensor.from_local(share, run.data.mesh, [Partial()], run_check=False).full_tensor()
