"""Your own model and training loop under FSDP2, on sequences sharded over all ranks.

torchrun --nproc-per-node 4 examples/attention_fsdp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from armillary.attention import ContextParallel, Local
from armillary.core import build_mesh

LENGTH, VOCABULARY, EMBED, HEADS, STEPS = 500, 64, 64, 4, 4
DOCUMENTS = [0, 130, 350, LENGTH]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(EMBED), nn.Linear(EMBED, 3 * EMBED), nn.Linear(EMBED, EMBED)
        self.mlp = nn.Sequential(nn.LayerNorm(EMBED), nn.Linear(EMBED, EMBED), nn.GELU(), nn.Linear(EMBED, EMBED))

    def forward(self, x, attention):
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(attention(q, k, v).flatten(2))  # the only changed line: `attention` takes [B, T, H, D]
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, EMBED), nn.Embedding(LENGTH, EMBED)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(EMBED, VOCABULARY)

    def forward(self, ids, position_ids, attention):
        x = self.tokens(ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, attention)
        return self.head(x)


def train(model, cp):
    """Trains, and returns the loss and the gradient norm of each step, equal on every rank."""
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=1e-3), [], []
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (1, LENGTH), generator=generator)  # the same on every rank
        batch = cp.shard(ids, documents=DOCUMENTS)
        logits = model(batch.ids, batch.position_ids, batch.attend)
        loss = cp.loss(logits, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))  # a DTensor under FSDP2
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def new_model():
    torch.manual_seed(0)
    return Model().double()


def sharded(ranks):
    """Returns the model with its parameters sharded by FSDP2, over the same ranks as the sequence."""
    model, mesh = new_model(), init_device_mesh("cpu", (ranks,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def errors(ranks):
    """Returns the largest relative errors of losses and of gradient norms, compared with one rank on full sequences."""
    mesh = build_mesh("cpu", ring=ranks)
    results = train(sharded(ranks), ContextParallel("ring", mesh))
    expected = train(new_model(), ContextParallel(Local(), mesh))
    return [
        max(abs(a - b) / abs(b) for a, b in zip(values, expected_values, strict=True))
        for values, expected_values in zip(results, expected, strict=True)
    ]


def main():
    losses, norms = errors(int(os.environ.get("WORLD_SIZE", "1")))
    print(f"rank {dist.get_rank()}: losses differ from one rank's by {losses:.1e}, gradients' norms by {norms:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
