from collections.abc import Callable
from math import prod

import pytest
import torch.distributed as dist
from hypothesis import settings
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from armillary.core import build_mesh

settings.register_profile("any machine", deadline=None)  # no test may depend on timing
settings.load_profile("any machine")


@pytest.fixture
def fake_mesh() -> Callable[..., DeviceMesh]:
    """Builds the mesh of one rank of many, on a process group that does not communicate.

    The fixture that destroys all process groups of this process destroys it after the test.
    """

    def build(rank: int = 0, /, **axes: int) -> DeviceMesh:
        dist.init_process_group("fake", rank=rank, world_size=prod(axes.values()), store=FakeStore())
        return build_mesh("cpu", **axes)

    return build
