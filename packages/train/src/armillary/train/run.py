"""A run: model, optimizer, data and the axis that they are sharded over."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Everything that a run needs, built and sharded.

    Args:
        data: the axis of all ranks that hold tokens of a step.
        mesh: the axes that batches lie on, as DTensors; None for models that take local tensors alone.
    """

    config: Config
    device: torch.device
    data: Axis
    mesh: DeviceMesh | None
    model: Llama | GPT
    optimizer: AdamW
    training: Batches
    validation: Batches
    tasks: dict[str, TaskRows]
    """Rows of `validation.tasks`, by name."""

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.training.tokens_per_batch * self.config.train.accumulation

    def placed(self, x: Tensor, layout: SequenceLayout) -> Tensor:
        """This rank's part [B, T] of a batch as a DTensor; or as it is, where DTensor has no shards like the layout's:
        those that are balanced differ, and of 250 tokens on 4 ranks two have 62, where DTensor would have 63 and 61."""
        if self.mesh is None or not is_cut_by_dtensor(layout, self.mesh, axes := self._axes(SEQUENCE_AXES)):
            return x
        return sequence_from_local(x, layout, self.mesh, axes=axes, rows=self._axes(ROW_AXES))

    def _axes(self, names: Sequence[str]) -> list[str]:
        """Those of the mesh."""
        return [name for name in names if self.mesh is not None and name in (self.mesh.mesh_dim_names or ())]

    def mask(self, batch: Batch) -> AttentionMask:
        """Causal; within documents if the configuration says so, and along the paths of trees in any case."""
        if batch.parents is not None:
            return mask_of_trees(batch.documents, batch.parents)
        return AttentionMask(documents=batch.documents if self.config.data.document_mask else None)


def mask_of_trees(documents: Documents, parents: Parents) -> AttentionMask:
    """Who sees whom in rows of trees: a token its own segment and those that this follows, up to itself."""
    rows = zip(documents, parents, strict=True)
    return AttentionMask.rows([AttentionMask.tree(ends, of_row) for ends, of_row in rows])
