"""Settings of all tests. The process that distributes tests to workers reads it too, so it imports little."""

import gc
import os
import sys
from collections.abc import Generator

import pytest

gc.disable()
"""Off until everything is imported: imports make millions of objects, and collections take a third of the time."""

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""Without bytecode files, each worker, rank and command would compile the sources and the tests again."""

os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "1"
"""torch only warns if an op returns one of its inputs, which compiled graphs may then overwrite."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turns garbage collection on again after the imports."""
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture(scope="module", autouse=True)
def freeze_older_objects() -> None:
    """Excludes objects that are older than the module's tests from garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Loads the fixtures of ranks where tests run. All packages share them: idle worlds of ranks use the processor."""
    runs_tests = hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None)
    if runs_tests:
        session.config.pluginmanager.import_plugin("armillary.core.testing.plugin")


def pytest_unconfigure() -> None:
    """Frees all objects before Python exits, because bindings warn about leaked ones."""
    gc.unfreeze()
