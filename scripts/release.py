"""Builds packages' wheels and tries each alone, as a user installs it: in a clean environment, without the workspace.

Before that, what a release states is checked: metadata, and the version against the newest heading of the changelog.
Each wheel is then installed with the wheels below it and with torch (the lowest that it allows, the newest, or both),
and `scripts/smoke.py` runs with it. Exit code 1 if anything failed.

    uv run python scripts/release.py                           # all packages with the newest torch; wheels are in dist/
    uv run python scripts/release.py core data --torch lowest newest --torch-backend cpu
    uv run python scripts/release.py --dry-run                 # what is stated, and the commands; nothing is built
    uv run python scripts/release.py --final                   # headings must have a date by now
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

ROOT = Path(__file__).parent.parent
HEADING = re.compile(r"^## (\S+) \((\S+)\)$", re.MULTILINE)
NUMPY_WARNING = "Failed to initialize NumPy"  # torch's, at import: an error here
STATED = {"requires-python", "license", "license-files", "authors", "keywords", "classifiers", "description", "readme"}

Torch = Literal["lowest", "newest"]


@dataclass(frozen=True)
class Package:
    """One of packages/: its folder, its table [project], and its changelog's text."""

    folder: Path
    project: dict[str, Any]
    changelog: str

    @classmethod
    def read(cls, folder: Path) -> Package:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        return cls(folder, project, (folder / "CHANGELOG.md").read_text())

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def version(self) -> str:
        return self.project["version"]

    @property
    def wheel(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"

    def bound(self, name: str) -> str | None:
        """What stands behind `name` in the dependencies, such as '>=2.11'; None if it is not among them."""
        found = (re.fullmatch(r"([\w-]+)(\[.*\])?(.*)", line) for line in self.project["dependencies"])
        return next((match[3] for match in found if match and match[1] == name), None)


def main() -> None:
    options = parsed()
    packages = [Package.read(path.parent) for path in sorted((ROOT / "packages").glob("*/pyproject.toml"))]
    known = {package.folder.name: package for package in packages}
    chosen = [known[name] for name in options.packages or known]
    failed = not show_statements(chosen, packages, options.final)
    with tempfile.TemporaryDirectory() as scratch:
        needed = {each.name: each for package in chosen for each in with_those_below(package, packages)}
        for command in build_commands(list(needed.values()), options.out):
            perform(command, ROOT, options.dry_run)
        for torch in cast("list[Torch]", options.torch):
            for package in chosen:
                commands = trial(package, packages, torch, options.out, Path(scratch), options.torch_backend)
                failed |= not tried(f"{package.name:22}{package.version:9}{torch:12}", commands, options.dry_run)
    sys.exit(failed)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folders = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(folders)}; all unless given")
    parser.add_argument("--torch", nargs="+", choices=["lowest", "newest"], default=["newest"])
    parser.add_argument("--torch-backend", help="uv's, such as cpu; a PyTorch index is then asked for torch")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--final", action="store_true", help="refuse changelogs that say (unreleased)")
    parser.add_argument("--dry-run", action="store_true", help="check what is stated; show the commands")
    options = parser.parse_args()
    if unknown := set(options.packages) - set(folders):
        parser.error(f"no package {', '.join(sorted(unknown))}; known: {', '.join(folders)}")
    options.out = options.out.resolve()
    return options


def show_statements(chosen: list[Package], packages: list[Package], final: bool) -> bool:
    """Prints a table of what packages state; False if any is wrong."""
    print(f"{'package':22}{'version':9}{'changelog':12}stated")
    found = {package.name: problems(package, packages, final) for package in chosen}
    for package in chosen:
        date = heading(package)[1]
        print(f"{package.name:22}{package.version:9}{date:12}{'; '.join(found[package.name]) or 'ok'}", flush=True)
    return not any(found.values())


def problems(package: Package, packages: list[Package], final: bool = False) -> list[str]:
    """What is wrong with what a package states; `final`: for a release that is not yet to come."""
    version, date = heading(package)
    found = [f"no {key}" for key in sorted(STATED) if not package.project.get(key)]
    if version != package.version:
        found.append(
            f"the changelog's newest heading is of {version or 'no version'}, the package of {package.version}"
        )
    if final and date == "unreleased":
        found.append("the changelog says (unreleased)")
    for other in packages:
        bound = package.bound(other.name)
        if bound is not None and bound != allowed(other.version):
            found.append(f"takes {other.name}{bound}, whose version is {other.version}; write {allowed(other.version)}")
    return found


def heading(package: Package) -> tuple[str, str]:
    """Version and date of the changelog's newest heading, '## 0.2.0 (unreleased)' or '## 0.2.0 (2026-11-30)'."""
    match = HEADING.search(package.changelog)
    return (match[1], match[2]) if match else ("", "")


def allowed(version: str) -> str:
    """The bound on a package of ours whose interface is that of `version`: 0.2.1 gives >=0.2,<0.3; 1.4.0 >=1.4,<2."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f">={major}.{minor},<" + (f"{major + 1}" if major else f"0.{minor + 1}")


def with_those_below(package: Package, packages: list[Package]) -> list[Package]:
    """The package and all of ours that it depends on, by what it and they state, lowest first."""
    below = [other for other in packages if package.bound(other.name) is not None]
    lists = [*(with_those_below(other, packages) for other in below), [package]]
    return list({each.name: each for each_list in lists for each in each_list}.values())


def build_commands(packages: list[Package], out: Path) -> list[list[str]]:
    # From a source distribution: what that lacks, the wheel lacks.
    return [["uv", "build", "--quiet", "--package", package.name, "--out-dir", str(out)] for package in packages]


def trial(
    package: Package, packages: list[Package], torch: Torch, wheels: Path, scratch: Path, backend: str | None = None
) -> list[list[str]]:
    """The commands that install `package` into a new environment and try it there. All trials take the same folder, so
    that bytecode of the one serves the next (bytecode lies beside, by path and time of the source)."""
    python, cache = str(scratch / "env/bin/python"), str(scratch / "bytecode")
    # By path: an index may have another wheel of that version. `tried` runs it where no pyproject.toml pins anything.
    wanted = [str(wheels / each.wheel) for each in with_those_below(package, packages)]
    wanted += [torch_requirement(package, packages, torch)] + (["--torch-backend", backend] if backend else [])
    smoke = ["-W", f"error:{NUMPY_WARNING}", "-I", str(ROOT / "scripts/smoke.py"), package.name]
    return [
        ["uv", "venv", "--quiet", "--clear", "--no-project", str(scratch / "env")],
        ["uv", "pip", "install", "--quiet", "--python", python, *wanted],
        [python, "-X", f"pycache_prefix={cache}", *smoke],
    ]


def torch_requirement(package: Package, packages: list[Package], torch: Torch) -> str:
    """'torch', or 'torch==2.11.*' for the lowest that the package and those below it allow."""
    bounds = [each.bound("torch") or "" for each in with_those_below(package, packages)]
    major, minor = max((int(a), int(b)) for bound in bounds for a, b in re.findall(r">=(\d+)\.(\d+)", bound))
    return "torch" if torch == "newest" else f"torch=={major}.{minor}.*"


def tried(title: str, commands: list[list[str]], dry_run: bool) -> bool:
    """Runs a trial's commands in a new folder, and prints a line, the last that they printed; False if one failed."""
    said = ""
    with tempfile.TemporaryDirectory() as folder:
        for command in commands:
            if dry_run:
                print(shlex.join(command))
                continue
            run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if run.returncode:
                print(f"{title}FAILED: {shlex.join(command)}\n{run.stdout}{run.stderr}", flush=True)
                return False
            said = run.stdout.strip().rpartition("\n")[2]
    if not dry_run:
        print(f"{title}{said}", flush=True)
    return True


def perform(command: list[str], folder: Path, dry_run: bool) -> None:
    if dry_run:
        print(shlex.join(command))
    else:
        subprocess.run(command, cwd=folder, check=True)


if __name__ == "__main__":
    if shutil.which("uv") is None:
        sys.exit("scripts/release.py: uv is not installed")
    main()
