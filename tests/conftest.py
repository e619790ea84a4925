from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> tuple[Path, str]:
    """Returns the folder and the output of a run without failures."""
    from recovery import (
        run_undisturbed,
    )  # imports that take seconds, which the process that distributes tests does not need

    return run_undisturbed(tmp_path_factory.mktemp("recovery"))
