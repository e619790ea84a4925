"""A checkpoint of torch's DCP, saved on ring=2 x ulysses=2 and resumed on ring=2 x tp=2.

torchrun --nproc-per-node 4 examples/checkpoint_on_another_mesh.py
"""

import os
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from context_parallel import LENGTH, STEPS, differences, new_model, new_optimizer, sharded, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from armillary.attention import ContextParallel
from armillary.attention.context_parallel import ContextParallelStyle
from armillary.core import build_mesh

SAVED = STEPS // 2


def sharded_by_heads():
    """Returns (model, ContextParallel) on the second mesh: `tp` shards heads and MLP, FSDP2 shards over `ring`."""
    mesh = build_mesh("cpu", ring=2, tp=2)
    model, cp = new_model(), ContextParallel("ring", mesh)
    columns, rows = ("attention.qkv", "mlp.1"), ("attention.out", "mlp.3")
    plan = {f"blocks.*.{name}": ColwiseParallel() for name in columns}
    parallelize_module(model, mesh["tp"], plan | {f"blocks.*.{name}": RowwiseParallel() for name in rows})
    style = ContextParallelStyle(cp.method, layout=cp.method.layout(LENGTH))
    parallelize_module(model, mesh["ring"], {"blocks.*.attention": style})
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["ring"])
    return model, cp


def state_of(model, optimizer):
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


def saved_run(model, cp, folder):
    """Trains the first half of the steps, saves a checkpoint, and returns losses and gradient norms."""
    optimizer = new_optimizer(model)
    results = train(model, cp, optimizer, range(SAVED))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return results


def resumed_run(model, cp, folder):
    """Loads the checkpoint into an untrained model and trains; returns losses and gradient norms of the other steps."""
    optimizer = new_optimizer(model)
    # DCP loads into these tensors, and determines from their sharding which parts of the files this rank reads.
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return train(model, cp, optimizer, range(SAVED, STEPS))


@contextmanager
def shared_folder():
    """Yields a temporary folder of rank 0 on all ranks. Several hosts need a shared file system."""
    with TemporaryDirectory() as local_folder:
        folder = [local_folder]
        dist.broadcast_object_list(folder)
        yield folder[0]
        dist.barrier()


def errors(ranks):
    """Returns the largest relative errors of losses and of gradient norms, compared with one run on one rank."""
    assert ranks == 4, "ring=2, ulysses=2 or tp=2: start it with torchrun --nproc-per-node 4"
    first, second = sharded(), sharded_by_heads()
    with shared_folder() as folder:
        before, after = saved_run(*first, folder), resumed_run(*second, folder)
    results = [[*values, *later_values] for values, later_values in zip(before, after, strict=True)]
    return differences(results, train(new_model()))


def main():
    losses, norms = errors(int(os.environ.get("WORLD_SIZE", "1")))
    print(f"rank {dist.get_rank()}: losses differ from one rank's by {losses:.1e}, gradients' norms by {norms:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
