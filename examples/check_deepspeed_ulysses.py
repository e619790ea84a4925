"""Checks DeepSpeed's Ulysses against one rank: python examples/check_deepspeed_ulysses.py (needs deepspeed)

The tests of this repository do not run this script, because they do not install deepspeed. Ulysses passes with
deepspeed 0.19.8 and torch 2.15. The scoreboard's adapter (benchmarks/scoreboard/contenders/deepspeed_ulysses.py) makes
the same calls.
"""

from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from armillary.check import StepOutput, check_model

VOCABULARY, EMBED, HEADS = 64, 32, 4


@cache
def sequence_group():
    """Returns the group of all ranks, registered with DeepSpeed like in `deepspeed.initialize(mesh_param=...)`."""
    import deepspeed
    from deepspeed.utils import groups

    # On CPUs DeepSpeed would compile a shared-memory all-reduce, which Ulysses does not use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    axes = ("data_parallel", "sequence_parallel")
    groups.mesh_device = deepspeed.comm.initialize_mesh_device((1, dist.get_world_size()), axes)
    return groups.mesh_device.get_group(mesh_dim="sequence_parallel")


class FullSequenceAttention(nn.Module):
    """Causal attention of a few heads over the full sequence, [B, N, H, D]."""

    def forward(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(EMBED), nn.Linear(EMBED, 3 * EMBED), nn.Linear(EMBED, EMBED)

    def forward(self, x):
        from deepspeed.sequence.layer import DistributedAttention

        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        attend = DistributedAttention(FullSequenceAttention(), sequence_group(), scatter_idx=2, gather_idx=1)
        return x + self.out(attend(q, k, v, 0).flatten(2))  # 0: the batch dim


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, EMBED), nn.Embedding(256, EMBED)
        self.layers, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(EMBED, VOCABULARY)

    def forward(self, ids, position_ids):
        x = self.tokens(ids) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def step(model, batch):
    positions = torch.arange(batch.ids.shape[1]).chunk(dist.get_world_size())[dist.get_rank()]
    logits, labels = model(batch.ids[:, positions], positions[None]), batch.shifted_labels
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, positions].flatten(), reduction="sum")
    loss = loss / (labels != -100).sum()
    loss.backward()
    return StepOutput(loss, positions)


def reduce(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


if __name__ == "__main__":
    print(check_model(Model, step, reduce=reduce, world_size=4, variants=["recompute", "two micro-batches"]))
