"""pytest fixtures around test worlds, to be imported in conftest.py."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
import torch.distributed as dist

from armillary.core.testing.world import Worlds

__all__ = ["no_group_left", "one_thread", "worlds"]


@pytest.fixture(scope="session")
def worlds() -> Generator[Worlds]:
    """Test worlds that are shared by all tests of the session: `worlds(4).run(function)`."""
    session_worlds = Worlds()
    yield session_worlds
    session_worlds.close()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Generator[None]:
    """Limits torch to one thread: on tiny tensors a second thread makes it slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_group_left() -> Generator[None]:
    """Destroys the process group that a test has started in this process."""
    before = dist.is_initialized()
    yield
    if dist.is_initialized() and not before:
        dist.destroy_process_group()
