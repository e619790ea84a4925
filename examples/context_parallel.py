"""A plain torch transformer over ring x ulysses: context-parallel by `parallelize_module`, parameters under FSDP2.

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
        # The outputs of `qkv` are ordered by head, so that tensor parallelism gives each rank q, k and v of its heads.
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

    def forward(self, ids, position_ids):  # explicit positions: torch.arange would be wrong on a shard
        return self.head(self.blocks(self.tokens(ids) + self.positions(position_ids)))


def new_model():
    torch.manual_seed(0)
    return Model().double()


def sharded(compiled=False):
    """Returns (model, ContextParallel) on 4 ranks; `compiled` modules are compiled before FSDP2 wraps them."""
    mesh = build_mesh("cpu", ring=2, ulysses=2)
    model, cp = new_model(), ContextParallel("usp", mesh)
    style = ContextParallelStyle(cp.method, layout=cp.method.layout(LENGTH))
    parallelize_module(model, mesh["ring", "ulysses"], {"blocks.*.attention": style})
    for module in (*model.blocks, model):
        if compiled:
            module.compile(backend="aot_eager", fullgraph=module is not model)
        fully_shard(module, mesh=mesh["ring", "ulysses"]._flatten("sequence"))
    return model, cp


def new_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, cp=None, optimizer=None, steps=range(STEPS)):
    """Trains, and returns the loss and the gradient norm of each step. With `cp`, on this rank's shard of each row."""
    optimizer, losses, norms = optimizer or new_optimizer(model), [], []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)  # the same on every rank
        if cp is None:
            logits = model(ids[:, :-1], torch.arange(LENGTH - 1)[None])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        else:
            batch = cp.shard(ids)
            loss = cp.loss(model(batch.ids, batch.position_ids), batch)
        loss.backward()
        norms.append(float(clip_gradients(model, 100.0)))  # also for parameters on several meshes
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def errors(ranks, compiled=False):
    """Returns the largest relative errors of losses and of gradient norms, compared with one rank on full sequences."""
    assert ranks == 4, "ring=2, ulysses=2: start it with torchrun --nproc-per-node 4"
    return differences(train(*sharded(compiled)), train(new_model()))


def differences(results, expected):
    """Returns the largest relative difference of losses and that of gradient norms."""
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
