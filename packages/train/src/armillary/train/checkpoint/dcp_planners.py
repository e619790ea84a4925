"""DCP's planners for tensors that FSDP2 and tensor parallelism both shard.

    dcp.save(state, checkpoint_id=folder, planner=SavePlanner())
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())

If tensor parallelism shards a dim unevenly, torch's own planners compute wrong offsets for some ranks' chunks
(`armillary.models.parameter_shards`). On other meshes torch's `DefaultLoadPlanner` can load these checkpoints too.
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

from armillary.models.parallel import local_part


class SavePlanner(DefaultSavePlanner):
    """Saves the local chunk of each `DTensor` at its offsets in the tensor."""

    def __init__(self) -> None:
        super().__init__()  # without options: torch's caching of plans is not supported

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            x = self.state_dict[item.index.fqn]
            if item.tensor_data is not None and has_local_chunk(x):
                chunk = local_chunk(x)
                index, data = MetadataIndex(item.index.fqn, chunk.offsets), replace(item.tensor_data, chunk=chunk)
                item = replace(item, index=index, tensor_data=data)
            items.append(item)
        self.plan = replace(plan, items=items)
        return self.plan


class LoadPlanner(DefaultLoadPlanner):
    """Loads the local chunk of each `DTensor` from the chunks that overlap with it in the checkpoint."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        entries = {n: x for n, x in self.metadata.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)}
        sharded = {name: entry for name, entry in entries.items() if has_local_chunk(self.state_dict.get(name))}
        # torch's items for DTensors may have wrong offsets. They are replaced by items for this rank's actual chunk.
        items = [item for item in plan.items if item.dest_index.fqn not in sharded]
        for name, entry in sharded.items():
            items += create_read_items_for_chunk_list(name, entry, [local_chunk(self.state_dict[name])])
        return replace(plan, items=items)


def has_local_chunk(x: Any) -> bool:
    return isinstance(x, DTensor) and x.device_mesh.get_coordinate() is not None


def local_chunk(x: DTensor) -> ChunkStorageMetadata:
    """Returns the offsets and sizes of this rank's chunk of `x`."""
    _, box = local_part(x)
    # DCP identifies a chunk by its offsets. An empty chunk lies at the end of the dim, where no other chunk begins.
    starts = [
        dim_slice.start if dim_slice.start < dim_slice.stop else size
        for dim_slice, size in zip(box, x.shape, strict=True)
    ]
    sizes = [dim_slice.stop - dim_slice.start for dim_slice in box]
    return ChunkStorageMetadata(offsets=torch.Size(starts), sizes=torch.Size(sizes))
