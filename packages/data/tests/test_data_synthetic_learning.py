"""A small model learns to recall across shards, and fails if attention is limited to the shard."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from armillary.core import SequenceLayout
from armillary.data.synthetic import AssociativeRecall, TaskRows, accuracy

N = 24
LAYOUT = SequenceLayout.zigzag(N, 2)
TASK = AssociativeRecall(N, pairs=6, keys=12, values=12, fillers=1, across=LAYOUT)


class Attention(nn.Module):
    """Causal attention of 2 heads, with a learned bias for each distance."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(2, N))

    def forward(self, x, visible):
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        distance = (torch.arange(N)[:, None] - torch.arange(N)).clamp(min=0)
        mask = self.bias[:, distance].masked_fill(~visible, -torch.inf)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two layers of attention."""

    def __init__(self, visible, width=32):
        super().__init__()
        self.visible, self.embed, self.head = (
            visible,
            nn.Embedding(TASK.vocab_size, width),
            nn.Linear(width, TASK.vocab_size),
        )
        self.first, self.second = Attention(width), Attention(width)

    def forward(self, tokens):
        return self.head(self.second(self.first(self.embed(tokens), self.visible), self.visible))


def reader(rows, first_row):
    full = SequenceLayout.contiguous(N, 1)
    return TaskRows(TASK, layout=full, shard=0, rows_per_batch=rows, first_row=first_row)


def learn(visible, steps=110):
    """Accuracy on unseen rows after `steps` steps of 32 rows."""
    model, rows = Model(visible), reader(32, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.0)
    for batch, _ in zip(rows, range(steps), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten()).backward()
        optimizer.step()
    unseen = reader(256, 10**6).batch(0)
    correct, counted = accuracy(model(unseen.tokens), unseen.labels)
    return float(correct / counted)


@pytest.mark.parametrize("across", [True, False])
def test_recall_is_learned_only_across_shards(across):
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    owner = LAYOUT.join([torch.full((size,), shard) for shard, size in enumerate(LAYOUT.sizes)], 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        right = learn(causal if across else causal & (owner[:, None] == owner))
    assert right > 0.95 if across else right < 2 / TASK.values
