"""Tests packages with another release of torch than the pinned one.

Everything else has its pinned version. uv downloads what its cache lacks, for a new release of torch about 3 GB, and
keeps the environment in its cache. Exits with pytest's exit code, or with 1 if the first run failed.

    uv run python scripts/torches.py lowest               # tests of core, attention, states and train
    uv run python scripts/torches.py 2.13 packages/core   # tests of one package, or of any path
    uv run python scripts/torches.py lowest --first-run   # trains on two ranks and saves three times, in half a minute
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from release import Package, torch_requirement, with_those_below

ROOT = Path(__file__).parent.parent
TESTED = ("packages/core", "packages/attention", "packages/states", "packages/train")
OF_TORCH = re.compile(r"(torch|triton|setuptools|nvidia-[\w-]+|cuda-[\w-]+)==")
"""Pins of torch and of packages whose versions each release of torch prescribes."""
LAUNCHER = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "armillary.train")
FIRST_RUN = (*LAUNCHER, "--train.steps", "6", "--save.every", "2", "--data.sequence-length", "256")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "torch", help="a minor release, such as 2.13, or 'lowest': the lowest that armillary-train allows"
    )
    parser.add_argument("tests", nargs="*", metavar="TEST", help=f"what pytest runs (default: {' '.join(TESTED)})")
    parser.add_argument("--first-run", action="store_true", help="run the trainer instead of tests")
    options = parser.parse_args()
    packages = [Package.read(path.parent) for path in sorted((ROOT / "packages").glob("*/pyproject.toml"))]
    with tempfile.TemporaryDirectory() as folder:
        write_requirements(Path(folder), options.torch, packages, with_tools=not options.first_run)
        if options.first_run:
            code = run(Path(folder), FIRST_RUN)
        else:
            # uv must not run in the workspace, whose settings pin torch, but pytest must.
            pytest = ["bash", "-c", 'cd "$0" && exec python -m pytest "$@"', str(ROOT)]
            code = run(Path(folder), [*pytest, *(options.tests or TESTED)])
    sys.exit(code)


def write_requirements(folder: Path, torch: str, packages: list[Package], with_tools: bool) -> None:
    """Writes requirements.txt and pins.txt: armillary-train and the packages below it, and the tools of tests."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = [pin for pin in settings["tool"]["uv"]["constraint-dependencies"] if not OF_TORCH.match(pin)]
    (train,) = (package for package in packages if package.folder.name == "train")
    lines = ["-c pins.txt", torch_requirement(train, packages, "lowest") if torch == "lowest" else f"torch=={torch}.*"]
    lines += [f"-e {package.folder}" for package in with_those_below(train, packages)]
    lines += settings["dependency-groups"]["dev"] if with_tools else []
    (folder / "pins.txt").write_text("\n".join(pins))
    (folder / "requirements.txt").write_text("\n".join(lines))


def run(folder: Path, command: Sequence[str]) -> int:
    """Runs a command in `folder`, in an environment with its requirements.txt. Returns the exit code."""
    environment = ["--quiet", "--no-project", "--isolated", "--python", sys.executable]
    uv = ["uv", "run", *environment, "--with-requirements", "requirements.txt"]
    return subprocess.run([*uv, *command], cwd=folder, check=False).returncode


if __name__ == "__main__":
    main()
