"""Checks of this repository on GPUs: see command.py."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

TRAINER = Path(__file__).parent.parent.parent / "packages" / "train" / "src" / "armillary" / "train"

if find_spec("pydantic") is None:
    # `import armillary.train` imports the trainer's configuration, which needs pydantic. The checks use modules of the
    # package that do not, in this process and in its ranks: for them the package is an empty one.
    package = ModuleType("armillary.train")
    package.__path__ = [str(TRAINER)]
    sys.modules[package.__name__] = package
