"""What holds for the tests of all packages. Whoever hands tests out to workers reads this too, so it imports little."""

import gc
import os
import sys
from collections.abc import Generator

import pytest

gc.disable()
"""Until all is imported: that makes millions of objects, and a third of the time would go to looking for garbage."""

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""Each worker, each rank and each command that is tried would compile the sources and the tests again."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Python looks for garbage again once all is imported."""
    found = yield
    gc.freeze()
    gc.enable()
    return found


@pytest.fixture(scope="module", autouse=True)
def freeze_older_objects() -> None:
    """Python looks for garbage among what a module's tests make, not among what was imported and kept before them."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Fixtures for those who run tests. One for all packages: worlds that nobody uses any more wake all the time."""
    runs_tests = hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None)
    if runs_tests:
        session.config.pluginmanager.import_plugin("armillary.core.testing.plugin")


def pytest_unconfigure() -> None:
    """Nothing is left when Python ends, of which bindings would warn."""
    gc.unfreeze()
