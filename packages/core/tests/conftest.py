from collections.abc import Callable, Generator
from contextlib import ExitStack

import pytest
from hypothesis import settings
from torch.distributed.device_mesh import DeviceMesh

from armillary.core.testing import fake_world

settings.register_profile("any machine", deadline=None)  # no test may depend on timing
settings.load_profile("any machine")


@pytest.fixture
def fake_mesh() -> Generator[Callable[..., DeviceMesh]]:
    """Builds the mesh of one rank of many, on a process group that does not communicate."""
    with ExitStack() as stack:
        yield lambda *rank, **axes: stack.enter_context(fake_world(*rank, **axes))
