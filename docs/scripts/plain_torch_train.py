import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from armillary.attention import ContextParallel
from armillary.attention.context_parallel import ContextParallelStyle
from armillary.core import build_mesh

LENGTH, VOCABULARY, EMBED, HEADS = 500, 64, 64, 4
device = "cuda" if torch.cuda.is_available() else "cpu"
ranks = int(os.environ["WORLD_SIZE"])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(EMBED, 3 * EMBED), nn.Linear(EMBED, EMBED)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(EMBED), Attention()

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, EMBED), nn.Embedding(LENGTH, EMBED)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(EMBED, VOCABULARY)

    def forward(self, ids, position_ids):
        return self.head(self.blocks(self.tokens(ids) + self.positions(position_ids)))
torch.manual_seed(0)
model = Model().to(device)
mesh = build_mesh(device, ring=ranks // 2, ulysses=2)
cp = ContextParallel("usp", mesh)
style = ContextParallelStyle(cp.method, layout=cp.method.layout(LENGTH))
parallelize_module(model, mesh["ring", "ulysses"], {"blocks.*.attention": style})
for part in (*model.blocks, model):
    fully_shard(part, mesh=init_device_mesh(device, (ranks,)))
optimizer, losses, norms = torch.optim.SGD(model.parameters(), lr=0.1), [], []
for step in range(3):
    torch.manual_seed(step)
    ids = torch.randint(VOCABULARY, (2, LENGTH), device=device)  # your rows, the same on every rank
    batch = cp.shard(ids)
    logits = model(batch.ids, batch.position_ids)
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
