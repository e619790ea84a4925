"""Many ranks in one process: a process group that answers at once and sends nothing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from math import prod
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore  # also makes the backend known

from armillary.core import build_mesh
from armillary.core.mesh import check_axes


@contextmanager
def fake_world(rank: int = 0, device: str = "cpu", /, **axes: int) -> Generator[DeviceMesh]:
    """The mesh, with these axes, that this rank of as many would have. Received tensors keep what was in them.

    Args:
        device: type of the device whose tensors go on it.

    Enter it before a `FakeTensorMode`, and build attention methods before it too: meshes and groups need real numbers.

    Raises:
        ValueError: an axis below 1, no such rank, or a process group is there already.
    """
    ranks = prod(axes.values())
    check_axes(axes, ranks)
    if not 0 <= rank < ranks:
        raise ValueError(f"there is no rank {rank} of {ranks}; choose from 0 to {ranks - 1}")
    if dist.is_initialized():
        raise ValueError(
            f"a process group of {dist.get_world_size()} ranks is there already; simulate in a process alone"
        )
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield build_mesh(device, **cast(Any, axes))
    finally:
        dist.destroy_process_group()
