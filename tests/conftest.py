from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> tuple[Path, str]:
    """A run that nobody disturbs: its folder, and what it printed."""
    from recovery import run_undisturbed  # not above: imports that take seconds, in whoever hands tests out too

    return run_undisturbed(tmp_path_factory.mktemp("recovery"))
