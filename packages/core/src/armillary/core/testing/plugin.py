"""The pytest side of the test worlds: import `worlds` in a conftest.py."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from armillary.core.testing.world import Worlds

__all__ = ["worlds"]


@pytest.fixture(scope="session")
def worlds() -> Generator[Worlds]:
    """Worlds that outlive a test, closed when the tests end."""
    opened = Worlds()
    yield opened
    opened.close()
