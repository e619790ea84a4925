"""A prepared run: model, optimizer and data of one rank, ready for `train_loop`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim import AdamW

from armillary.attention import AttentionMask
from armillary.core import Axis
from armillary.data import Batch, Batches
from armillary.data.parts import Documents, Parents
from armillary.models import GPT, Llama
from armillary.train.config.sections import Config


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
        """Returns the mask of a batch as configured; see `batch_mask`."""
        return batch_mask(batch.documents, batch.parents, self.config.data.documents)


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
