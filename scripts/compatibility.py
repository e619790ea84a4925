"""Tests the packages with another Python or another release of torch, and records the result.

Everything else has its pinned version; with `lowest`, what packages require has its lowest version. uv downloads what
its cache lacks, for a new release of torch about 3 GB, and keeps the environment in its cache. Exits with pytest's exit
code, or with 1 if the first run failed.

    uv run python scripts/compatibility.py lowest                       # tests of train and all packages below
    uv run python scripts/compatibility.py 2.13 packages/core           # tests of one package, or of any path
    uv run python scripts/compatibility.py pinned --python 3.13 --record  # all tests; writes docs/compatibility.md
    uv run python scripts/compatibility.py lowest --first-run           # trains on two ranks, in half a minute
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from release import Package, torch_requirement, with_those_below

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/compatibility.md"
TESTED = tuple(f"packages/{name}" for name in ("core", "attention", "states", "data", "models", "train"))
PRESCRIBED = re.compile(r"(torch|triton|setuptools|nvidia-[\w-]+|cuda-[\w-]+|pydantic-core)==")
"""Pins of torch and of packages whose versions each release of torch, or of pydantic, prescribes."""
LAUNCHER = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "armillary.train")
FIRST_RUN = (*LAUNCHER, "--train.steps", "6", "--save.every", "2", "--data.sequence-length", "256")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "torch", help="'pinned', a minor release, such as 2.13, or 'lowest', which armillary-train allows"
    )
    parser.add_argument(
        "tests", nargs="*", metavar="TEST", help=f"what pytest runs (default: all if pinned, else {' '.join(TESTED)})"
    )
    parser.add_argument("--python", default=sys.executable, help="version or path (default: this one)")
    parser.add_argument("--first-run", action="store_true", help="run the trainer instead of tests")
    parser.add_argument("--record", action="store_true", help="write the result into docs/compatibility.md")
    options = parser.parse_intermixed_args()
    packages = [Package.read(path.parent) for path in sorted((ROOT / "packages").glob("*/pyproject.toml"))]
    tests = options.tests or (() if options.torch == "pinned" else TESTED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_requirements(folder, options.torch, packages, with_tools=not options.first_run)
        if options.first_run:
            sys.exit(run(folder, FIRST_RUN, options.python))
        # uv must not run in the workspace, whose settings pin torch, but pytest must.
        pytest = ["bash", "-c", 'cd "$0" && exec python -m pytest "$@"', str(ROOT), f"--junitxml={folder}/results.xml"]
        code = run(folder, [*pytest, *tests], options.python)
        if options.record and (folder / "results.xml").exists():  # otherwise no test ran
            record(folder, options.python, " ".join(tests) or "all", code)
    sys.exit(code)


def write_requirements(folder: Path, torch: str, packages: list[Package], with_tools: bool) -> None:
    """Writes requirements.txt, pins.txt and uv.toml: armillary-train and those below it, or all; the tools of tests."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins: list[str] = settings["tool"]["uv"]["constraint-dependencies"]
    (train,) = (package for package in packages if package.folder.name == "train")
    requirement, chosen = "torch", packages
    if torch != "pinned":
        pins = [pin for pin in pins if not PRESCRIBED.match(pin)]
        requirement = torch_requirement(train, packages, "lowest") if torch == "lowest" else f"torch=={torch}.*"
        chosen = with_those_below(train, packages)
    groups = settings["dependency-groups"]
    tools = [line for line in groups["dev"] if isinstance(line, str)]
    if torch == "lowest":
        required = {re.split(r"[^\w-]", line)[0] for package in chosen for line in package.project["dependencies"]}
        pins = [pin for pin in pins if pin.partition("==")[0] not in required]
        (folder / "uv.toml").write_text('resolution = "lowest-direct"\n')
    else:
        tools += groups["hosts"]  # these require newer versions than our packages do
    lines = ["-c pins.txt", requirement, *(f"-e {package.folder}" for package in chosen)]
    lines += tools if with_tools else []
    (folder / "pins.txt").write_text("\n".join(pins))
    (folder / "requirements.txt").write_text("\n".join(lines))


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
