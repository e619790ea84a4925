"""DCP's planners for tensors that FSDP2 and tensor parallelism both shard.

    dcp.save(state, checkpoint_id=folder, planner=SavePlanner())
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())

torch's own planners misplace the chunks of ranks where tensor parallelism shards a dim unevenly
(`armillary.models.parameter_shards`). They can read these checkpoints on meshes where torch computes the right chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from armillary.models.parameter_shards import local_part


class SavePlanner(DefaultSavePlanner):
    """Saves the local chunk of each `DTensor` at its offsets in the tensor. Plans are not cached."""

    def __init__(self) -> None:
        super().__init__()

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[at_offsets(item, self.state_dict[item.index.fqn]) for item in plan.items])
        return self.plan


class LoadPlanner(DefaultLoadPlanner):
    """Loads the local chunk of each `DTensor`."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        entries = {n: x for n, x in self.metadata.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)}
        sharded = {name: entry for name, entry in entries.items() if is_local(self.state_dict.get(name))}
        # torch's items for these tensors are replaced by items for the chunk that this rank really holds.
        items = [item for item in plan.items if item.dest_index.fqn not in sharded]
        for name, entry in sharded.items():
            items += create_read_items_for_chunk_list(name, entry, [local_chunk(self.state_dict[name])])
        return replace(plan, items=items)


def is_local(x: Any) -> bool:
    """Returns True for a `DTensor` on a mesh that has this rank."""
    return isinstance(x, DTensor) and x.device_mesh.get_coordinate() is not None


def at_offsets(item: WriteItem, x: Any) -> WriteItem:
    """Returns an item with the offsets of the local chunk, if `x` is a `DTensor`."""
    if not is_local(x) or item.tensor_data is None:
        return item
    chunk = local_chunk(x)
    index = MetadataIndex(item.index.fqn, chunk.offsets)
    return replace(item, index=index, tensor_data=replace(item.tensor_data, chunk=chunk))


def local_chunk(x: DTensor) -> ChunkStorageMetadata:
    """Returns the offsets and sizes of this rank's chunk.

    DCP tells chunks apart by their offsets, so an empty one is placed at the end, where no other chunk begins.
    """
    _, box = local_part(x)
    starts = [
        dim_slice.start if dim_slice.start < dim_slice.stop else size
        for dim_slice, size in zip(box, x.shape, strict=True)
    ]
    sizes = [dim_slice.stop - dim_slice.start for dim_slice in box]
    return ChunkStorageMetadata(offsets=torch.Size(starts), sizes=torch.Size(sizes))
