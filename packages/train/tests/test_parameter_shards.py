"""Local shards of tensors sharded over two axes, and their checkpoints."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from armillary.core.internal import compat, dtensor
from armillary.core.testing import mesh
from armillary.models.parallel import local_part
from armillary.models.parameter_shards import box_of
from armillary.train.checkpoint import LoadPlanner, SavePlanner

ROWS = (1, 3, 5, 8, 9, 17, 22, 33, 257)


def sharded_rows(size: int, fsdp: int, tp: int) -> dict[tuple[int, int], range]:
    """Row ranges by mesh coordinate: FSDP2 shards the tensor-parallel shards."""
    row_ranges: dict[tuple[int, int], range] = {}
    for turn, outer in enumerate(torch.arange(size).split(dtensor.chunk_sizes(size, tp))):
        for rank, inner in enumerate(outer.split(dtensor.chunk_sizes(len(outer), fsdp))):
            row_ranges[rank, turn] = range(int(inner[0]), int(inner[-1]) + 1) if len(inner) else range(0)
    return row_ranges


@pytest.mark.parametrize("fsdp, tp", list(product((1, 3, 4), (2, 3, 8))))
def test_boxes_are_fsdp_shards_of_tensor_parallel_shards(fsdp, tp):
    strided, coordinates = _StridedShard(0, split_factor=tp), list(product(range(fsdp), range(tp)))
    for size in (*range(1, 80), 244, 257, 258, 259, 684):
        actual = {
            coordinate: box_of((size, 6), (fsdp, tp), coordinate, (strided, Shard(0)))[0] for coordinate in coordinates
        }
        assert {
            coordinate: range(box.start, box.stop) for coordinate, box in actual.items() if box.start < box.stop
        } == {coordinate: box for coordinate, box in sharded_rows(size, fsdp, tp).items() if box}
        assert sorted(i for box in actual.values() for i in range(box.start, box.stop)) == list(range(size))


def test_boxes_of_other_placements():
    assert box_of((7, 10), (2, 4), (1, 3), (Shard(0), Shard(-1))) == (slice(4, 7), slice(9, 10))
    assert box_of((9,), (2, 2), (1, 0), (Shard(0), Shard(0))) == (
        slice(5, 7),
    )  # sharded from left to right: 5 and 4, then 2 and 2
    copied = box_of((9,), (2, 2, 2), (1, 0, 1), (Replicate(), _StridedShard(0, split_factor=2), Shard(0)))
    assert copied == (slice(5, 7),)


class Tables(nn.Module):
    """Weights of `ROWS` rows sharded over tp and FSDP2, and one sharded by columns over tp."""

    def __init__(self, axes: dict[str, int], data: bool):
        super().__init__()
        over = mesh(**axes)
        for rows in ROWS:
            self.register_parameter(f"rows {rows}", shard(full_weight(rows) * data, over, 0))
        self.register_parameter("columns", shard(full_weight(5) * data, over, 1))
        fully_shard(self, mesh=compat.flatten(over, ("shard", "ring"), "fsdp"))


def shard(x: torch.Tensor, over, dim: int) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(x, over["tp"], [Shard(dim)], src_data_rank=None))


def full_weight(rows: int) -> torch.Tensor:
    return 1 + torch.arange(rows * 7.0).view(rows, 7)


def expected() -> dict[str, torch.Tensor]:
    return {**{f"rows {rows}": full_weight(rows) for rows in ROWS}, "columns": full_weight(5)}


def wrong_weights(tables: nn.Module) -> list[str]:
    """Names of weights whose local shard or full tensor is wrong."""
    weights = {name: weight.detach() for name, weight in tables.state_dict().items()}
    shards = {name: local_part(weight) for name, weight in weights.items()}
    faults = [name for name, (local, box) in shards.items() if not torch.equal(local, expected()[name][box])]
    return faults + [
        name for name, weight in weights.items() if not torch.equal(weight.full_tensor(), expected()[name])
    ]


def save_tables(folder: Path) -> list[str]:
    tables = Tables({"shard": 1, "ring": 2, "tp": 2}, data=True)
    dcp.save({"model": tables.state_dict(), "name": "tables"}, checkpoint_id=folder, planner=SavePlanner())
    return wrong_weights(tables)


def load_tables(folder: Path) -> list[str]:
    """Names of weights that are wrong after loading them on one of several meshes."""
    faults = []
    for axes in ({"shard": 2, "tp": 2}, {"shard": 1, "tp": 4}, {"shard": 2, "ring": 2}):
        tables = Tables(axes, data=False)
        state = {"model": tables.state_dict(), "name": ""}
        dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())
        assert all(isinstance(weight, DTensor) for weight in state["model"].values()) and state["name"] == "tables"
        faults += wrong_weights(tables)
    return faults


def test_uneven_shards_and_their_checkpoints_are_exact(worlds, tmp_path):
    assert worlds(4).run(save_tables, tmp_path) == [[]] * 4
    assert worlds(4).run(load_tables, tmp_path) == [[]] * 4
    one = {"model": {name: torch.zeros_like(weight) for name, weight in expected().items()}}
    dcp.load(one, checkpoint_id=tmp_path, no_dist=True)  # torch's default planner reads it
    assert all(torch.equal(one["model"][name], weight) for name, weight in expected().items())
