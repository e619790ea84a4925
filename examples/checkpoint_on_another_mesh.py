"""A checkpoint of torch's DCP, saved on ring=2 x ulysses=2 and read on ring=2 x tp=2, where training goes on.

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
    """(the model, its context parallelism) on the mesh that reads: `tp` cuts heads and MLP, FSDP2 over `ring`."""
    mesh = build_mesh("cpu", ring=2, tp=2)
    model, cp = model_of(), ContextParallel("ring", mesh)
    columns, rows = ("attention.qkv", "mlp.1"), ("attention.out", "mlp.3")
    cut = {f"blocks.*.{name}": ColwiseParallel() for name in columns}
    parallelize_module(model, mesh["tp"], cut | {f"blocks.*.{name}": RowwiseParallel() for name in rows})
    style = ContextParallelStyle(cp.method, layout=cp.method.layout(LENGTH))
    parallelize_module(model, mesh["ring"], {"blocks.*.attention": style})
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["ring"])
    return model, cp


def state_of(model, optimizer):
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


def saved_run(model, cp, folder):
    """The losses and norms of the steps before the checkpoint, which it leaves in the folder."""
    optimizer = optimizer_of(model)
    found = train(model, cp, optimizer, range(SAVED))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return found


def resumed_run(model, cp, folder):
    """The losses and norms of the steps after it, from a model that has learned nothing yet."""
    optimizer = optimizer_of(model)
    state = state_of(model, optimizer)  # as this mesh has it: DCP reads what each rank needs of it
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return train(model, cp, optimizer, range(SAVED, STEPS))


@contextmanager
def folder_of_all():
    """A folder that rank 0 makes and removes; on several hosts it has to be one that all of them see."""
    with TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        yield folder[0]
        dist.barrier()


def errors(ranks):
    """How far losses and gradients are from those of one rank that never stopped, relatively."""
    assert ranks == 4, "ring=2, ulysses=2 or tp=2: start it with torchrun --nproc-per-node 4"
    first, second = sharded(), sharded_by_heads()
    with folder_of_all() as folder:
        before, after = saved_run(*first, folder), resumed_run(*second, folder)
    found = [[*first, *then] for first, then in zip(before, after, strict=True)]
    return differences(found, train(model_of()))


def main():
    losses, norms = errors(int(os.environ.get("WORLD_SIZE", "1")))
    print(f"rank {dist.get_rank()}: losses differ from one rank's by {losses:.1e}, gradients' norms by {norms:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
