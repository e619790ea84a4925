"""A run: model, optimizer, data and the axis that they are sharded over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

from armillary.attention import AttentionMask
from armillary.core import Axis, SequenceLayout
from armillary.core.sequence import SEQUENCE_AXES, is_cut_by_dtensor, sequence_from_local
from armillary.data import Batch, Batches
from armillary.data.loader.batch import Documents, Parents
from armillary.data.synthetic import TaskRows
from armillary.models import GPT, Llama
from armillary.models.dtensors import ROW_AXES
from armillary.train.config import Config


@dataclass
class Run:
    """A model, optimizer and data, built and sharded.

    Args:
        data: the axis of all ranks that hold tokens of a step.
        mesh: the mesh of a batch's DTensors.
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

    def distributed(self, x: Tensor, layout: SequenceLayout) -> Tensor:
        """Returns this rank's part [B, T] of a batch as a DTensor [rows, N], for code that composes with the model.

        It stays local if DTensor has no such shards: shards of balanced layouts differ in length, and of 250 tokens
        on 4 ranks zigzag gives two ranks 62, DTensor 63 and 61.
        """
        names = self.mesh.mesh_dim_names or ()
        axes, rows = ([name for name in kind if name in names] for kind in (SEQUENCE_AXES, ROW_AXES))
        if not is_cut_by_dtensor(layout, self.mesh, axes):
            return x
        return sequence_from_local(x, layout, self.mesh, axes=axes, rows=rows)

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
