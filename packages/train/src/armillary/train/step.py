"""One step of a prepared run: the loss of a global batch, its gradients, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from armillary.attention import AttentionMask
from armillary.core import Axis, clip_gradients, to_device
from armillary.data import Batch, Batches
from armillary.data.internal import Documents, Parents
from armillary.models import GPT, GPTConfig, Llama, LlamaConfig, linear_token_loss
from armillary.models.parallel import begin_micro_batch
from armillary.train.config.sections import Config
from armillary.train.optimizer import learning_rate


@dataclass
class Run:
    """A sharded model with its optimizer, and loaders that read this rank's tokens.

    Args:
        data: axis of all ranks that hold different tokens of a step; losses and label counts are summed over it.
        training: yields this rank's micro-batches, one after the other.
        validation: micro-batches of held-out rows.
    """

    config: Config
    device: torch.device
    data: Axis
    model: Llama | GPT
    optimizer: AdamW
    training: Batches
    validation: Batches

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, over all ranks and micro-batches."""
        return self.training.tokens_per_batch * self.config.train.accumulation

    def mask(self, batch: Batch) -> AttentionMask:
        """Returns the mask of a batch as configured."""
        return batch_mask(batch.documents, batch.parents, self.config.data.documents)


@dataclass(frozen=True)
class StepResult:
    """Loss and gradient norm (before clipping) over all ranks, equal on every rank.

    A step is `good` if both are finite; otherwise the optimizer's update was skipped.
    """

    loss: float
    grad_norm: float

    @property
    def good(self) -> bool:
        return isfinite(self.loss) and isfinite(self.grad_norm)


def train_step(
    run: Run, step: int, batches: list[Batch], observer: AbstractContextManager[object] | None = None
) -> StepResult:
    """Takes one optimizer step on one global batch, of which `batches` are this rank's micro-batches.

    The loss is the sum over the labelled tokens of all micro-batches and ranks, divided by the number of these tokens
    (for trees, by the sum of their weights). So it does not depend on the mesh or on the number of micro-batches.

    Args:
        observer: a context around forward and backward, left before gradients are clipped. An error of its exit ends
            the step without the update.
    """
    rate = learning_rate(step, run.config.train.steps, run.config.optimizer)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    # 1. Count the labels of all micro-batches and ranks. Each micro-batch's loss is divided by this number, so it must
    # be known before the first backward.
    label_count = sum_over_ranks(run, sum(batch.labelled for batch in batches))
    label_count = label_count.where(label_count > 0, 1)  # a batch of padding has loss 0, not 0 / 0
    # 2. Forward and backward. Autograd adds gradients over micro-batches, FSDP2's reduce-scatter adds them over ranks.
    losses = list[Tensor]()
    with observer or nullcontext():
        for i, batch in enumerate(batches):
            if run.config.parallel.zero_stage == 1:
                # Stage 1 gathers parameters for the first micro-batch and reduces gradients after the last one.
                begin_micro_batch(run.model, last=i == len(batches) - 1)
            losses.append(backward(run, batch, label_count))
    norm = clip_gradients(run.model, run.config.optimizer.clip_norm)
    # `item` makes the host wait for the GPU: once a step, after forward and backward are queued.
    result = StepResult(sum_over_ranks(run, torch.stack(losses).sum()).item(), norm.item())
    # 3. Update the weights. Loss and norm are equal on all ranks, so all ranks update or all skip.
    if result.good:
        run.optimizer.step()
    run.optimizer.zero_grad()
    return result


def backward(run: Run, batch: Batch, label_count: Tensor) -> Tensor:
    """Adds a micro-batch's gradients to the parameters' gradients; returns this rank's share of the step's loss."""
    total, _ = forward(run, batch)
    loss_share = total / label_count.to(total.dtype)
    loss_share.backward()
    return loss_share.detach()


def forward(run: Run, batch: Batch, head: Callable[..., Any] = linear_token_loss) -> Any:
    """Runs the model on this rank's tokens of a batch; returns `head(hidden, weight, labels=labels)`.

    hidden [B, T, E] is the input of the LM head, and weight [V, E] the head's weight. By default the sum of losses and
    the number of labels.
    """
    # Tokens, labels and activations are local tensors; parameters and their gradients are DTensors.
    labels = to_device(batch.labels, run.device) if isinstance(batch.labels, Tensor) else batch.labels.to(run.device)
    # Without resets and trees all rows have the same positions: [T] instead of [B, T].
    by_row = run.config.data.reset_positions or batch.parents is not None
    return run.model(
        to_device(batch.tokens, run.device),
        positions=to_device(batch.positions if by_row else batch.positions[0], run.device),
        mask=run.mask(batch),
        layout=batch.layout,
        head=partial(head, labels=labels),
    )


def shards_states(config: Config, model: LlamaConfig | GPTConfig) -> bool:
    """Returns True if layers with a state run on the shards of the batch, whose layout must then suit them."""
    has_states = isinstance(model, LlamaConfig) and model.states is not None
    return has_states and not config.parallel.contiguous_states


def batch_mask(documents: Documents, parents: Parents | None, within_documents: bool) -> AttentionMask:
    """Returns the causal mask of a batch.

    Args:
        documents: boundaries of the documents of each row; for rows of trees, boundaries of the trees' segments.
        parents: for rows of trees, the parent of each segment. A token then attends to the segments of its ancestors,
            and to its own segment up to itself.
        within_documents: True: tokens attend only within their document. Rows of trees ignore it.
    """
    if parents is None:
        return AttentionMask(documents=documents if within_documents else None)
    rows = zip(documents, parents, strict=True)
    return AttentionMask.rows([AttentionMask.tree(ends, row_parents) for ends, row_parents in rows])


def sum_over_ranks(run: Run, value: Tensor | float) -> Tensor:
    # `full` fills the tensor on the device. `torch.tensor` would copy from the host, and the host would wait for it.
    dtype = torch.float64 if isinstance(value, float) else None
    local_value = value.clone() if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=run.device)
    dist.all_reduce(local_value, group=run.data.group)
    return local_value
