"""A checkpoint of torch's DCP, saved on ring=2 x ulysses=2 and resumed on ring=2 x tp=2.

torchrun --nproc-per-node 4 examples/checkpoint_on_another_mesh.py
"""

import os
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from context_parallel import LENGTH, STEPS, differences, model_of, optimizer_of, sharded, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from armillary.attention import ContextParallel
from armillary.attention.context_parallel import ContextParallelStyle
from armillary.core import build_mesh

SAVED = STEPS // 2


def sharded_by_heads():
    """Returns (model, context parallelism) on the second mesh: `tp` shards heads and MLP, FSDP2 shards over `ring`."""
    mesh = build_mesh("cpu", ring=2, tp=2)
    model, cp = model_of(), ContextParallel("ring", mesh)
    columns, rows = ("attention.qkv", "mlp.1"), ("attention.out", "mlp.3")
    plan = {f"blocks.*.{name}": ColwiseParallel() for name in columns}
    parallelize_module(model, mesh["tp"], plan | {f"blocks.*.{name}": RowwiseParallel() for name in rows})
    style = ContextParallelStyle(cp.method, layout=cp.method.layout(LENGTH))
    parallelize_module(model, mesh["ring"], {"blocks.*.attention": style})
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["ring"])
    return model, cp


def state_of(model, optimizer):
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


def saved_run(model, cp, folder):
    """Trains, saves the checkpoint, and returns losses and gradient norms."""
    optimizer = optimizer_of(model)
    results = train(model, cp, optimizer, range(SAVED))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return results


def resumed_run(model, cp, folder):
    """Resumes with an untrained model, and returns losses and gradient norms of the remaining steps."""
    optimizer = optimizer_of(model)
    state = state_of(model, optimizer)  # with this mesh's sharding, from which DCP determines the parts to read
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return train(model, cp, optimizer, range(SAVED, STEPS))


@contextmanager
def shared_folder():
    """A temporary folder of rank 0, used by all ranks. With several hosts it must be on a shared file system."""
    with TemporaryDirectory() as local_folder:
        folder = [local_folder]
        dist.broadcast_object_list(folder)
        yield folder[0]
        dist.barrier()


def errors(ranks):
    """Largest relative errors of losses and gradient norms, compared with an uninterrupted run on one rank."""
    assert ranks == 4, "ring=2, ulysses=2 or tp=2: start it with torchrun --nproc-per-node 4"
    first, second = sharded(), sharded_by_heads()
    with shared_folder() as folder:
        before, after = saved_run(*first, folder), resumed_run(*second, folder)
    results = [[*first, *then] for first, then in zip(before, after, strict=True)]
    return differences(results, train(model_of()))


def main():
    losses, norms = errors(int(os.environ.get("WORLD_SIZE", "1")))
    print(f"rank {dist.get_rank()}: losses differ from one rank's by {losses:.1e}, gradients' norms by {norms:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
