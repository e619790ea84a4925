from collections.abc import Iterator

import pytest
import torch

from armillary.core.testing.plugin import worlds

__all__ = ["worlds"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are tiny: waiting for a second thread, beside other processes, costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
