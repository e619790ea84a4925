"""Tests the packages with another Python or another release of torch, and records the result.

Everything else has its pinned version; with `lowest`, what packages and their extras require has its lowest version.
uv downloads what its cache lacks, for a new release of torch about 3 GB, and keeps the environment in its cache. Exits
with pytest's exit code, or with 1 if the first run failed.

    uv run python scripts/compatibility.py lowest                       # tests of train and all packages below
    uv run python scripts/compatibility.py lowest packages/integrations packages/check
    uv run python scripts/compatibility.py 2.13 packages/core           # tests of one package, or of any path
    uv run python scripts/compatibility.py pinned --python 3.13 --record  # all tests; writes docs/compatibility.md
    uv run python scripts/compatibility.py lowest --first-run           # trains on two ranks, in half a minute
    UV_INDEX=... UV_INDEX_STRATEGY=unsafe-best-match uv run python scripts/compatibility.py nightly
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from release import Package, name_of, torch_requirement, with_those_below

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/compatibility.md"
TESTED = tuple(f"packages/{name}" for name in ("core", "attention", "states", "data", "models", "train"))
UNTESTED = "flash"
"""An extra that needs a GPU."""
PRESCRIBED = re.compile(r"(torch|triton|setuptools|nvidia-[\w-]+|cuda-[\w-]+|pydantic-core)==")
"""Pins of torch and of packages whose versions each release of torch, or of pydantic, prescribes."""
LAUNCHER = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "armillary.train")
FIRST_RUN = (*LAUNCHER, "--train.steps", "6", "--save.every", "2", "--data.sequence-length", "256")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "torch", help="'pinned', a minor release, such as 2.13, 'lowest', which armillary-train allows, or 'nightly'"
    )
    parser.add_argument(
        "tests", nargs="*", metavar="TEST", help=f"what pytest runs (default: all if pinned, else {' '.join(TESTED)})"
    )
    parser.add_argument("--python", default=sys.executable, help="version or path (default: this one)")
    parser.add_argument("--first-run", action="store_true", help="run the trainer instead of tests")
    parser.add_argument("--record", action="store_true", help="write the result into docs/compatibility.md")
    options = parser.parse_intermixed_args()
    if options.torch == "nightly" and "UV_INDEX" not in os.environ:
        parser.error("nightly: UV_INDEX must name torch's index of nightly builds")
    packages = [Package.read(path.parent) for path in sorted((ROOT / "packages").glob("*/pyproject.toml"))]
    tests = options.tests or (() if options.torch == "pinned" else TESTED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_requirements(folder, options.torch, packages, tests, with_tools=not options.first_run)
        if options.first_run:
            sys.exit(run(folder, FIRST_RUN, options.python))
        # uv must not run in the workspace, whose settings pin torch, but pytest must.
        pytest = ["bash", "-c", 'cd "$0" && exec python -m pytest "$@"', str(ROOT), f"--junitxml={folder}/results.xml"]
        code = run(folder, [*pytest, *tests], options.python)
        if options.record and (folder / "results.xml").exists():  # otherwise no test ran
            record(folder, options.python, " ".join(tests) or "all", code)
    sys.exit(code)


def write_requirements(
    folder: Path, torch: str, packages: list[Package], tests: Sequence[str], with_tools: bool
) -> None:
    """Writes requirements.txt, pins.txt and uv.toml, for the packages whose tests run, all below them, and the tools.

    With `pinned` these are all packages. Others need neither hosts of integrations nor an extra, except with `lowest`.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = settings["dependency-groups"]
    pins: list[str] = settings["tool"]["uv"]["constraint-dependencies"]
    tools = [line for line in groups["dev"] if isinstance(line, str)] if with_tools else []
    folders = {Path(test).parts[1] for test in tests if test.startswith("packages/")} or {"train"}
    named = [package for package in packages if package.folder.name in folders]
    below = {other.name: other for package in named for other in with_those_below(package, packages)}.values()
    chosen = packages if torch == "pinned" else list(below)
    requirement, editable = "torch", [f"-e {package.folder}" for package in chosen]
    if torch != "pinned":
        pins = [pin for pin in pins if not PRESCRIBED.match(pin)]
        requirement = f"torch=={torch}.*"
    if torch == "nightly":  # of an index that UV_INDEX names
        (folder / "uv.toml").write_text('prerelease = "allow"\n')
        requirement = "torch"
    if torch == "lowest":
        (folder / "uv.toml").write_text('resolution = "lowest-direct"\n')
        requirement = torch_requirement(named[-1], packages, "lowest")
        required = [line for package in packages for line in package.project["dependencies"]]
        if with_tools:
            extras = {package.name: package.project.get("optional-dependencies", {}) for package in packages}
            names = [",".join(sorted(extras[package.name].keys() - {UNTESTED})) for package in chosen]
            editable = [f"{line}[{each}]" for line, each in zip(editable, names, strict=True)]
            required += [line for extra in extras.values() for lines in extra.values() for line in lines]
            # Its tests are skipped where no package takes it: it would rule out the lowest versions of other packages,
            # as pins of what extras and tools require in turn would.
            tools = [line for line in tools if name_of(line) != "transformers"]
            pins = [pin for pin in pins if name_of(pin) in {name_of(line) for line in tools}]
        pins = [pin for pin in pins if name_of(pin) not in {name_of(line) for line in required}]
    elif with_tools:
        tools += groups["hosts"]
    (folder / "pins.txt").write_text("\n".join(pins))
    (folder / "requirements.txt").write_text("\n".join(["-c pins.txt", requirement, *editable, *tools]))


def run(folder: Path, command: Sequence[str], python: str) -> int:
    """Runs a command in `folder`, in an environment with its requirements.txt. Returns the exit code."""
    return subprocess.run([*environment(python), *command], cwd=folder, check=False).returncode


def environment(python: str) -> list[str]:
    options = ["--quiet", "--no-project", "--isolated", "--python", python]
    return ["uv", "run", *options, "--with-requirements", "requirements.txt"]


# -- the page ---------------------------------------------------------------------------------------------------------


def record(folder: Path, python: str, tests: str, code: int) -> None:
    """Replaces the page's row of this Python, torch and tests."""
    script = "import platform, torch; print(platform.python_version(), torch.__version__.partition('+')[0])"
    words = subprocess.run(
        [*environment(python), "python", "-c", script], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    results = ElementTree.parse(folder / "results.xml").getroot()
    counts = {
        key: sum(int(suite.get(key, 0)) for suite in results) for key in ("tests", "failures", "errors", "skipped")
    }
    failed = counts["failures"] + counts["errors"]
    python_version, torch_version = words.stdout.split()
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ).stdout
    columns = [
        *(python_version, torch_version, tests.replace("packages/", "")),
        *(str(counts["tests"] - failed - counts["skipped"]), str(failed), str(counts["skipped"])),
        *("passed" if code == 0 else "failed", str(date.today()), revision.strip()),
    ]
    before, table, after = re.split(r"((?:^\|.*\n)+)", PAGE.read_text(), maxsplit=1, flags=re.MULTILINE)
    header, *rows = table.splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]
    cells = sorted([*(row for row in cells if row[:3] != columns[:3]), columns])
    lines = [header, rows[0], *(f"| {' | '.join(row)} |" for row in cells)]
    PAGE.write_text("".join([before, *(f"{line}\n" for line in lines), after]))


if __name__ == "__main__":
    main()
