"""A plain torch transformer: `parallelize_module` shares its sequences, FSDP2 its parameters, over ring x ulysses.

torchrun --nproc-per-node 4 examples/context_parallel.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from armillary.attention import ContextParallel
from armillary.attention.context_parallel import ContextParallelStyle
from armillary.core import build_mesh, clip_gradients

LENGTH, VOCABULARY, EMBED, HEADS, STEPS = 500, 64, 64, 4, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(EMBED, 3 * EMBED), nn.Linear(EMBED, EMBED)

    def forward(self, x):
        # Head by head, so that tensor parallelism may cut it: a rank's outputs are q, k and v of its own heads.
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, EMBED // HEADS)).transpose(1, 3).unbind(1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(EMBED)
        self.mlp = nn.Sequential(nn.LayerNorm(EMBED), nn.Linear(EMBED, EMBED), nn.GELU(), nn.Linear(EMBED, EMBED))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, EMBED), nn.Embedding(LENGTH, EMBED)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(EMBED, VOCABULARY)

    def forward(self, ids, position_ids):  # a shard's positions are given: torch.arange would be those of the first
        return self.head(self.blocks(self.tokens(ids) + self.positions(position_ids)))


def model_of():
    torch.manual_seed(0)
    return Model().double()


def sharded(compiled=False):
    """(the model, its context parallelism) on 4 ranks."""
    mesh = build_mesh("cpu", ring=2, ulysses=2)
    model, cp = model_of(), ContextParallel("usp", mesh)
    style = ContextParallelStyle(cp.method, layout=cp.method.layout(LENGTH))
    parallelize_module(model, mesh["ring", "ulysses"], {"blocks.*.attention": style})
    for part in (*model.blocks, model):
        if compiled:
            part.compile(backend="aot_eager", fullgraph=part is not model)
        fully_shard(part, mesh=mesh["ring", "ulysses"]._flatten("sequence"))
    return model, cp


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, cp=None, optimizer=None, steps=range(STEPS)):
    """The losses of these steps, and the norms of their gradients; with `cp`, from this rank's shard of each row."""
    optimizer, losses, norms = optimizer or optimizer_of(model), [], []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)  # the same on every rank
        if cp is None:
            loss = F.cross_entropy(
                model(ids[:, :-1], torch.arange(LENGTH - 1)[None]).flatten(0, 1), ids[:, 1:].flatten()
            )
        else:
            batch = cp.shard(ids)
            loss = cp.loss(model(batch.ids, batch.position_ids), batch)
        loss.backward()
        norms.append(float(clip_gradients(model, 100.0)))  # torch's own wants all parameters on one mesh
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def errors(ranks, compiled=False):
    """How far losses and gradients are from those of one rank that has whole sequences, relatively."""
    assert ranks == 4, "ring=2, ulysses=2: start it with torchrun --nproc-per-node 4"
    return differences(train(*sharded(compiled)), train(model_of()))


def differences(found, expected):
    """The largest relative one of losses, and that of norms."""
    return [
        max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))
        for got, wanted in zip(found, expected, strict=True)
    ]


def main():
    losses, norms = errors(int(os.environ.get("WORLD_SIZE", "1")))
    print(f"rank {dist.get_rank()}: losses differ from one rank's by {losses:.1e}, gradients' norms by {norms:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
