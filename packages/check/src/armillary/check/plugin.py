"""A pytest fixture, for conftest.py: `from armillary.check.plugin import context_parallel_check`.

def test_my_context_parallelism(context_parallel_check):
    context_parallel_check(build, step, world_size=4)
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

from armillary.check.model import ModelReport, check_model
from armillary.core.testing import Worlds

__all__ = ["context_parallel_check"]


@pytest.fixture(scope="session")
def context_parallel_check() -> Generator[Callable[..., ModelReport]]:
    """`check_model` on ranks that outlive a test. Fails the test, and names the mistake, if anything is wrong."""
    worlds = Worlds()

    def check(*args: Any, **kwargs: Any) -> ModelReport:
        report = check_model(*args, worlds=worlds, **kwargs)
        report.assert_right()
        return report

    yield check
    worlds.close()
