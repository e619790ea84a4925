"""Checks torch's own `context_parallel` against one rank: python examples/check_torch_context_parallel.py

torch's ring supports only the attention kernels of CUDA; `use_cpu_kernel` adds the kernel of the CPU, so that no GPU is
needed.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from armillary.check import StepOutput, check_model

VOCABULARY, EMBED, HEADS = 64, 32, 4
aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(EMBED), nn.Linear(EMBED, 3 * EMBED), nn.Linear(EMBED, EMBED)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


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


def step(model, batch, positions_restart=False):
    """The step of torch's tutorial: the context manager shards the buffers; forward and backward run inside it.

    With `positions_restart` each rank counts positions from 0, a mistake that the check must report.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    use_cpu_kernel()
    positions = torch.arange(batch.ids.shape[1])[None]
    ids, labels = batch.ids.clone(), batch.shifted_labels.clone()
    buffers = [ids, labels, positions]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
        position_ids = torch.arange(ids.shape[1])[None] if positions_restart else positions
        logits = model(ids, position_ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / (batch.shifted_labels != -100).sum()
        loss.backward()
    return StepOutput(loss, positions)


def reduce(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def use_cpu_kernel():
    """Registers torch's ring for flash attention on the CPU, as `context_parallel` does for CUDA."""
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    torch_ring.custom_ops |= {forward: ring_forward, backward: ring_backward}


def ring_forward(op, args, kwargs):
    q, k, v, dropout, causal = (*args, 0.0, False)[:5]
    kernel, mesh = aten._scaled_dot_product_flash_attention_for_cpu, q.device_mesh
    local, options = [x.to_local() for x in (q, k, v)], {"is_causal": causal, "dropout_p": dropout}
    out, lse, *_ = torch_ring._templated_ring_attention(mesh.get_group(), 2, kernel, *local, **options)
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in (out, lse))


def ring_backward(op, args, kwargs):
    dout, q, k, v, out, lse, dropout, causal = args[:8]
    mesh = q.device_mesh
    local = [x.to_local() if isinstance(x, DTensor) else x for x in (dout, q, k, v, out, lse)]
    gradients = torch_ring._templated_ring_attention_backward(
        mesh.get_group(), 2, op, local[0], "grad_out", *local[1:], is_causal=causal, dropout_p=dropout
    )
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in gradients[:3])


def check(worlds=None, world_size=4, **faults):
    """Returns the report of the check. `faults` are arguments of `step` that plant a mistake."""
    # float32, because torch merges partial results in at most that precision.
    return check_model(
        Model,
        partial(step, **faults),
        reduce=reduce,
        world_size=world_size,
        dtype=torch.float32,
        variants=["two micro-batches"],
        worlds=worlds,
    )


if __name__ == "__main__":
    print(check())
