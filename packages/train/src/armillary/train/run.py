"""A run: model, optimizer, data and the axis that they are sharded over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim import AdamW

from armillary.attention import AttentionMask
from armillary.core import Axis
from armillary.data import Batch, Batches
from armillary.data.synthetic import TaskRows
from armillary.models import GPT, Llama
from armillary.train.config import Config


@dataclass
class Run:
    """Everything that a run needs, built and sharded. `data` is the axis of all ranks that hold tokens of a step."""

    config: Config
    device: torch.device
    data: Axis
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

    def mask(self, batch: Batch) -> AttentionMask:
        return AttentionMask(documents=batch.documents if self.config.data.document_mask else None)
