"""A mesh of many ranks in one process, for dry runs and simulations."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from math import prod
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore  # its import registers the backend "fake"

from armillary.core.mesh import build_mesh, check_axes


@contextmanager
def fake_world(rank: int = 0, device: str = "cpu", /, **axes: int) -> Generator[DeviceMesh]:
    """Context manager that yields the mesh as one rank sees it, on a process group that communicates nothing.

    Receive buffers keep their contents. Enter this context, and build attention methods, before a `FakeTensorMode`:
    meshes and process groups need tensors with values.

    Args:
        rank: the rank that this process stands for.
        device: device type of the mesh.
        axes: sizes of the mesh's axes, as in `build_mesh`.

    Raises:
        ValueError: an axis below 1, a rank outside the mesh, or a default process group that exists already.
    """
    # Collectives on fake tensors. Imported here, because it takes as long as torch, and not every command needs it.
    import_module("torch.distributed._tools.fake_collectives")
    ranks = prod(axes.values())
    check_axes(axes, ranks)
    if not 0 <= rank < ranks:
        raise ValueError(f"there is no rank {rank} of {ranks}; choose from 0 to {ranks - 1}")
    if dist.is_initialized():
        raise ValueError(
            f"a process group of {dist.get_world_size()} ranks is there already; simulate in a process without one"
        )
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield build_mesh(device, **cast(Any, axes))
    finally:
        dist.destroy_process_group()
