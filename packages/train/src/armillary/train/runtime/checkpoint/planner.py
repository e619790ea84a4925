"""torch's distributed checkpoints (DCP) of tensors that FSDP2 and tensor parallelism have both cut.

torch's own planners misplace what ranks hold where tensor parallelism cuts a dim unevenly (`armillary.core.shards`).

    dcp.save(state, checkpoint_id=folder, planner=SavePlanner())
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())

What these write is read by any planner, on meshes where torch is right.
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

from armillary.core.shards import local_part


class SavePlanner(DefaultSavePlanner):
    """Writes each rank's part of a `DTensor` as what it is. Plans are not cached."""

    def __init__(self) -> None:
        super().__init__()

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[placed(item, self.state_dict[item.index.fqn]) for item in plan.items])
        return self.plan


class LoadPlanner(DefaultLoadPlanner):
    """Reads for each `DTensor` what this rank holds of it."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        found = {n: x for n, x in self.metadata.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)}
        sharded = {name: saved for name, saved in found.items() if is_here(self.state_dict.get(name))}
        items = [item for item in plan.items if item.dest_index.fqn not in sharded]
        for name, saved in sharded.items():
            items += create_read_items_for_chunk_list(name, saved, [chunk_of(self.state_dict[name])])
        return replace(plan, items=items)


def is_here(x: Any) -> bool:
    """Whether it is a `DTensor`, and this rank one of its mesh."""
    return isinstance(x, DTensor) and x.device_mesh.get_coordinate() is not None


def placed(item: WriteItem, x: Any) -> WriteItem:
    """What to write, where it is a part of a `DTensor`, at its place."""
    if not is_here(x) or item.tensor_data is None:
        return item
    chunk = chunk_of(x)
    index = MetadataIndex(item.index.fqn, chunk.offsets)
    return replace(item, index=index, tensor_data=replace(item.tensor_data, chunk=chunk))


def chunk_of(x: DTensor) -> ChunkStorageMetadata:
    """What this rank holds. An empty part lies at the end: DCP knows parts by their offsets, and none begins there."""
    _, box = local_part(x)
    starts = [part.start if part.start < part.stop else size for part, size in zip(box, x.shape, strict=True)]
    sizes = [part.stop - part.start for part in box]
    return ChunkStorageMetadata(offsets=torch.Size(starts), sizes=torch.Size(sizes))
