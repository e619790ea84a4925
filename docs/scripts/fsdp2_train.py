import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from armillary.attention import AttentionMask, ContextParallel
from armillary.core import build_mesh

LENGTH, VOCABULARY, EMBED, HEADS = 500, 64, 64, 4
device = "cuda" if torch.cuda.is_available() else "cpu"
ranks = int(os.environ["WORLD_SIZE"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(EMBED), nn.Linear(EMBED, 3 * EMBED), nn.Linear(EMBED, EMBED)

    def forward(self, x, attention):
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(self.norm(x)).chunk(3, -1))  # [B, T, H, D]
        return x + self.out(attention(q, k, v).flatten(2))


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


def causal(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
torch.manual_seed(0)
model, mesh = Model().to(device), init_device_mesh(device, (ranks,))
for part in (*model.blocks, model):
    fully_shard(part, mesh=mesh)
cp = ContextParallel("ring", build_mesh(device, ring=ranks))
optimizer, losses, norms = torch.optim.SGD(model.parameters(), lr=0.1), [], []
for step in range(3):
    torch.manual_seed(step)
    ids = torch.randint(VOCABULARY, (2, LENGTH), device=device)  # your rows, the same on every rank
    batch = cp.shard(ids)
    logits = model(batch.ids, batch.position_ids, batch.attend)
    loss = cp.loss(logits, batch)
    loss.backward()
    norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()))
    losses.append(float(loss.detach()))
    optimizer.step()
    optimizer.zero_grad()
if torch.distributed.get_rank() == 0:
    print("losses", losses)
    print("norms", norms)
torch.distributed.destroy_process_group()
