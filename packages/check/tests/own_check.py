"""User-defined steps for `armillary-check`: a model of one layer, with and without reduced gradients."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from armillary.check import StepOutput


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, ids):
        return self.head(self.embed(ids))


def step(model, batch):
    positions = torch.arange(batch.ids.shape[1]).chunk(dist.get_world_size())[dist.get_rank()]
    logits = model(batch.ids[:, positions])
    labels = batch.shifted_labels
    total = F.cross_entropy(logits.flatten(0, 1), labels[:, positions].flatten(), reduction="sum")
    return StepOutput(total / (labels != -100).sum(), positions)


def reduce(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def forgotten():
    return Model(), step


def right():
    return Model(), step, reduce
