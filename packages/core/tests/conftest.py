import pytest
import torch.distributed as dist
from hypothesis import settings

from armillary.core.testing.plugin import one_thread, worlds

__all__ = ["one_thread", "worlds"]

settings.register_profile("any machine", deadline=None)  # no test may depend on how long something takes
settings.load_profile("any machine")


@pytest.fixture
def no_group() -> None:
    """A process without a process group, whatever a test before has left: a mesh of one rank starts one that stays."""
    if dist.is_initialized():
        dist.destroy_process_group()
