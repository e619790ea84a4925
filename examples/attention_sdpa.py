"""An unmodified model that calls F.scaled_dot_product_attention, on a sequence sharded over all ranks.

torchrun --nproc-per-node 4 examples/attention_sdpa.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from armillary.attention import build_attention, sdpa_parallel, sequence
from armillary.core import build_mesh

LENGTH, EMBED, HEADS = 1000, 64, 4


class Block(nn.Module):
    """Your existing block. Its code knows nothing of ranks or shards."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(EMBED), nn.Linear(EMBED, 3 * EMBED), nn.Linear(EMBED, EMBED)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def errors(ranks):
    """Returns the relative errors of the output and of a gradient, compared with one rank."""
    ulysses = 2 if ranks % 2 == 0 else 1
    attend = build_attention("usp", build_mesh("cpu", ring=ranks // ulysses, ulysses=ulysses))
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()), torch.randn(1, LENGTH, EMBED)

    # 1. On all ranks, each with its shard of x.
    layout = attend.layout(LENGTH)
    with sequence(layout=layout), sdpa_parallel(attend):
        out = model(layout.take(x, attend.shard))
    out.square().sum().backward()
    gradient = model[0].qkv.weight.grad.clone()
    # Each rank has the gradient of its own tokens. FSDP2 averages: call `armillary.core.sum_gradients(model)` with it.
    dist.all_reduce(gradient)

    # 2. On this rank alone, with all of x.
    model.zero_grad()
    full = model(x)
    full.square().sum().backward()
    pairs = (out, layout.take(full, attend.shard)), (gradient, model[0].qkv.weight.grad)
    return [((actual - expected).norm() / expected.norm()).item() for actual, expected in pairs]


def main():
    output, gradient = errors(int(os.environ.get("WORLD_SIZE", "1")))
    print(f"rank {dist.get_rank()}: output differs from one rank's by {output:.1e}, gradient by {gradient:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
