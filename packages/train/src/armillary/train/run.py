"""A run: model, optimizer, data and the axis that they are sharded over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

from armillary.attention import AttentionMask
from armillary.core import Axis
from armillary.data import Batch, Batches
from armillary.data.loader.batch import Documents, Parents
from armillary.data.synthetic import TaskRows
from armillary.models import GPT, Llama
from armillary.train.config import Config


@dataclass
class Run:
    """A model, optimizer and data, built and sharded.

    Args:
        data: the axis of all ranks that hold tokens of a step.
        mesh: the mesh of a batch's DTensors, for code that composes with the model (`models.dtensors.tokens_dtensor`).
    """

    config: Config
    device: torch.device
    data: Axis
    mesh: DeviceMesh
    model: Llama | GPT
    optimizer: AdamW
    training: Batches
    validation: Batches
    tasks: dict[str, TaskRows]
    """Rows of each of `validation.tasks`."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.training.tokens_per_batch * self.config.train.accumulation

    def mask(self, batch: Batch) -> AttentionMask:
        """Returns a causal mask: within documents if so configured, and always along the paths of trees."""
        return batch_mask(batch.documents, batch.parents, self.config.data.documents)


def batch_mask(documents: Documents, parents: Parents | None, within_documents: bool) -> AttentionMask:
    """Returns the mask of a batch: causal, within documents if so configured, and along the paths of trees.

    A token of a tree sees the segments on its path, up to itself.
    """
    if parents is None:
        return AttentionMask(documents=documents if within_documents else None)
    rows = zip(documents, parents, strict=True)
    return AttentionMask.rows([AttentionMask.tree(ends, row_parents) for ends, row_parents in rows])
