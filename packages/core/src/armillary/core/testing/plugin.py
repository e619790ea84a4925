"""The pytest side of the test worlds: import its fixtures in a conftest.py."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
import torch.distributed as dist

from armillary.core.testing.world import Worlds

__all__ = ["no_group_left", "one_thread", "worlds"]


@pytest.fixture(scope="session")
def worlds() -> Generator[Worlds]:
    """Worlds that outlive a test, closed when the tests end."""
    opened = Worlds()
    yield opened
    opened.close()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Generator[None]:
    """Tensors of tests are tiny: waiting for a second thread, beside other processes, costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_group_left() -> Generator[None]:
    """Ends the process group that a test has started in this process, such as by a mesh of one rank."""
    before = dist.is_initialized()
    yield
    if dist.is_initialized() and not before:
        dist.destroy_process_group()
