"""Checks accelerate's context parallelism, FSDP2 included, against one rank: python examples/check_accelerate.py

accelerate accepts `cp_size` only on GPUs; `accelerator_on_cpu` disables its check. On GPUs,
`Accelerator(parallelism_config=..., fsdp_plugin=...)` does the same.
"""

import os
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from check_torch_context_parallel import Model, use_cpu_kernel

from armillary.check import StepOutput, check_model


def step(accelerator, model, batch):
    """The step of accelerate's documentation: `maybe_context_parallel` shards the buffers, FSDP2 averages gradients."""
    positions = torch.arange(batch.ids.shape[1])[None]
    ids, labels = batch.ids.clone(), batch.shifted_labels.clone()
    buffers = [ids, labels, positions]
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
    ):
        logits = model(ids, positions)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        # FSDP2 averages gradients over ranks, so each local loss is multiplied by the number of ranks.
        loss = loss * accelerator.num_processes / (batch.shifted_labels != -100).sum()
        accelerator.backward(loss)
    return StepOutput(loss.detach(), positions)


def build():
    use_cpu_kernel()
    accelerator = accelerator_on_cpu()
    model, _ = accelerator.prepare(model := Model(), torch.optim.SGD(model.parameters(), lr=0.0))
    return model, partial(step, accelerator)


def one_rank():
    return Model(), one_rank_step


def one_rank_step(model, batch):
    logits = model(batch.ids, torch.arange(batch.ids.shape[1])[None])
    loss = F.cross_entropy(logits.flatten(0, 1), batch.shifted_labels.flatten())
    loss.backward()
    return StepOutput(loss)


def accelerator_on_cpu():
    """Returns an Accelerator over all ranks of the default process group, which exists already."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "ACCELERATE_USE_CPU": "true"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})  # required, but unused
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    with patch.object(ParallelismConfig, "_validate_accelerator"):  # the check for GPUs
        accelerator = Accelerator(
            cpu=True, parallelism_config=ParallelismConfig(cp_size=dist.get_world_size()), fsdp_plugin=plugin
        )
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator


def check(worlds=None, world_size=2):
    return check_model(
        build, reference=one_rank, world_size=world_size, dtype=torch.float32, variants=[], worlds=worlds
    )


if __name__ == "__main__":
    print(check())
