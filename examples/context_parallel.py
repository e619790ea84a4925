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

from armillary.attention import Ring, Ulysses
from armillary.attention.integrations import ContextParallel, shard_batch, whole_loss
from armillary.core import build_mesh, sum_gradients

LENGTH, VOCABULARY, EMBED, HEADS, STEPS = 500, 64, 64, 4, 4


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
    """(the model, its method) on 4 ranks."""
    mesh = build_mesh("cpu", ring=2, ulysses=2)
    attend = Ulysses(mesh["ulysses"], inner=Ring(mesh["ring"]))
    model, layout = model_of(), attend.layout(LENGTH)
    parallelize_module(model, mesh["ring", "ulysses"], {"blocks.*.attention": ContextParallel(attend, layout=layout)})
    for part in (*model.blocks, model):
        if compiled:
            part.compile(backend="aot_eager", fullgraph=part is not model)
        fully_shard(part, mesh=mesh["ring", "ulysses"]._flatten("sequence"))
    sum_gradients(model)  # every rank has its own tokens: gradients are shares
    return model, attend


def train(model, attend=None):
    """The losses of all steps, and the norms of their gradients; with `attend`, of this rank's shard, summed."""
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=1e-3), [], []
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)  # the same on every rank
        if attend is None:
            loss = F.cross_entropy(
                model(ids[:, :-1], torch.arange(LENGTH - 1)[None]).flatten(0, 1), ids[:, 1:].flatten()
            )
        else:
            batch = shard_batch(attend, ids)
            logits = model(batch.ids, batch.position_ids)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") / batch.labelled
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        losses.append(float(loss.detach() if attend is None else whole_loss(loss.detach(), attend)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def errors(ranks, compiled=False):
    """How far losses and gradients are from those of one rank that has whole sequences, relatively."""
    assert ranks == 4, "ring=2, ulysses=2: start it with torchrun --nproc-per-node 4"
    found, expected = train(*sharded(compiled)), train(model_of())
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
