"""What ranks hold of tensors that are cut by two axes, and checkpoints of them."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from armillary.core import compat
from armillary.core.placements import chunk_sizes
from armillary.core.testing import mesh
from armillary.models.parameter_shards import box_of, local_part
from armillary.train.checkpoint import LoadPlanner, SavePlanner

ROWS = (1, 3, 5, 8, 9, 17, 22, 33, 257)


def held(size: int, fsdp: int, tp: int) -> dict[tuple[int, int], range]:
    """By coordinate: FSDP2 cuts what tensor parallelism has left."""
    parts: dict[tuple[int, int], range] = {}
    for turn, outer in enumerate(torch.arange(size).split(chunk_sizes(size, tp))):
        for rank, inner in enumerate(outer.split(chunk_sizes(len(outer), fsdp))):
            parts[rank, turn] = range(int(inner[0]), int(inner[-1]) + 1) if len(inner) else range(0)
    return parts


@pytest.mark.parametrize("fsdp, tp", list(product((1, 2, 3, 4, 7, 16), (2, 3, 4, 8))))
def test_boxes_are_fsdp_shards_of_tensor_parallel_shards(fsdp, tp):
    strided, coordinates = _StridedShard(0, split_factor=tp), list(product(range(fsdp), range(tp)))
    for size in (*range(1, 80), 244, 257, 258, 259, 684):
        actual = {at: box_of((size, 6), (fsdp, tp), at, (strided, Shard(0)))[0] for at in coordinates}
        assert {at: range(part.start, part.stop) for at, part in actual.items() if part.start < part.stop} == {
            at: part for at, part in held(size, fsdp, tp).items() if part
        }
        assert sorted(i for part in actual.values() for i in range(part.start, part.stop)) == list(range(size))


def test_boxes_of_other_placements():
    assert box_of((7, 10), (2, 4), (1, 3), (Shard(0), Shard(-1))) == (slice(4, 7), slice(9, 10))
    assert box_of((9,), (2, 2), (1, 0), (Shard(0), Shard(0))) == (slice(5, 7),)  # from left to right: 5, 4; then 2, 2
    copied = box_of((9,), (2, 2, 2), (1, 0, 1), (Replicate(), _StridedShard(0, split_factor=2), Shard(0)))
    assert copied == (slice(5, 7),)
    with pytest.raises(ValueError, match="3 parts along dim 0 are cut by no axes to the right"):
        box_of((9,), (2, 2), (0, 0), (_StridedShard(0, split_factor=3), Shard(0)))
    with pytest.raises(ValueError, match="must be sharded or replicated"):
        box_of((9,), (2,), (0,), (Partial(),))


class Tables(nn.Module):
    """Weights of so many rows each, cut over tp and FSDP2; and one that tp cuts by columns."""

    def __init__(self, axes: dict[str, int], data: bool):
        super().__init__()
        over = mesh(**axes)
        for rows in ROWS:
            self.register_parameter(f"rows {rows}", cut(whole(rows) * data, over, 0))
        self.register_parameter("columns", cut(whole(5) * data, over, 1))
        fully_shard(self, mesh=compat.flatten(over, ("shard", "ring"), "fsdp"))


def cut(x: torch.Tensor, over, dim: int) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(x, over["tp"], [Shard(dim)], src_data_rank=None))


def whole(rows: int) -> torch.Tensor:
    return 1 + torch.arange(rows * 7.0).view(rows, 7)


def expected() -> dict[str, torch.Tensor]:
    return {**{f"rows {rows}": whole(rows) for rows in ROWS}, "columns": whole(5)}


def wrong(tables: nn.Module) -> list[str]:
    """Weights of which this rank's part or the whole isn't what it should be."""
    weights = {name: weight.detach() for name, weight in tables.state_dict().items()}
    parts = {name: local_part(weight) for name, weight in weights.items()}
    faults = [name for name, (local, box) in parts.items() if not torch.equal(local, expected()[name][box])]
    return faults + [
        name for name, weight in weights.items() if not torch.equal(weight.full_tensor(), expected()[name])
    ]


def saved(folder: Path) -> list[str]:
    tables = Tables({"shard": 2, "ring": 2, "tp": 2}, data=True)
    dcp.save({"model": tables.state_dict(), "name": "tables"}, checkpoint_id=folder, planner=SavePlanner())
    return wrong(tables)


def loaded(folder: Path, axes: dict[str, int]) -> list[str]:
    tables = Tables(axes, data=False)
    state = {"model": tables.state_dict(), "name": ""}
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())
    assert all(isinstance(weight, DTensor) for weight in state["model"].values()) and state["name"] == "tables"
    return wrong(tables)


def test_parts_wholes_and_checkpoints_are_exact_where_tensor_parallelism_cuts_unevenly(worlds, tmp_path):
    assert worlds(8).run(saved, tmp_path) == [[]] * 8
    for axes in ({"shard": 2, "ring": 2, "tp": 2}, {"shard": 2, "tp": 4}, {"shard": 8}):
        assert worlds(8).run(loaded, tmp_path, axes) == [[]] * 8
    one = {"model": {name: torch.zeros_like(weight) for name, weight in expected().items()}}
    dcp.load(one, checkpoint_id=tmp_path, no_dist=True)  # as torch alone reads it
    assert all(torch.equal(one["model"][name], weight) for name, weight in expected().items())
