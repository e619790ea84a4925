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
def fake_world(**axes: int) -> Generator[DeviceMesh]:
    """The mesh, with these axes, that rank 0 of as many ranks would have. Received tensors keep what was in them.

    Enter it before a `FakeTensorMode`, and build attention methods before it too: meshes and groups need real numbers.

    Raises:
        ValueError: an axis below 1, or a process group is there already.
    """
    check_axes(axes, prod(axes.values()))
    if dist.is_initialized():
        raise ValueError(
            f"a process group of {dist.get_world_size()} ranks is there already; simulate in a process alone"
        )
    dist.init_process_group("fake", rank=0, world_size=prod(axes.values()), store=FakeStore())
    try:
        yield build_mesh("cpu", **cast(Any, axes))
    finally:
        dist.destroy_process_group()
