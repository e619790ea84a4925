"""Builds the packages' wheels and tests each in a clean environment outside of the workspace.

First checks the metadata, and the version against the newest heading of the changelog. Each wheel is then installed
with the wheels below it and with torch (the lowest allowed, the newest, or both), and runs `scripts/smoke.py`. With the
lowest torch all else that they require has its lowest version too. Exits with 1 if anything failed.

    uv run python scripts/release.py                           # all packages with the newest torch; wheels are in dist/
    uv run python scripts/release.py core data --torch lowest newest --torch-backend cpu
    uv run python scripts/release.py --dry-run                 # checks metadata and prints the commands
    uv run python scripts/release.py --final --tag v0.3.0      # requires headings with a date, and the tag's version
    python scripts/release.py --notes                          # prints what the newest release changed, as Markdown
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
NUMPY_WARNING = "Failed to initialize NumPy"  # torch's warning at import, treated as an error
STATED = {"requires-python", "license", "license-files", "authors", "keywords", "classifiers", "description", "readme"}

Torch = Literal["lowest", "newest"]


@dataclass(frozen=True)
class Package:
    """A package: its folder, its table [project] and its changelog."""

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
        """The bound on the dependency `name`, such as '>=2.11', or None without that dependency."""
        matches = (re.fullmatch(r"([\w-]+)(\[.*\])?(.*)", line) for line in self.project["dependencies"])
        return next((match[3] for match in matches if match and match[1] == name), None)


def main() -> None:
    options = parse_arguments()
    packages = [Package.read(path.parent) for path in sorted((ROOT / "packages").glob("*/pyproject.toml"))]
    if options.notes:
        print("\n\n".join(f"# {package.name}\n\n{newest_section(package)}" for package in packages))
        return
    all_packages = {package.folder.name: package for package in packages}
    chosen = [all_packages[name] for name in options.packages or all_packages]
    failed = not show_statements(chosen, packages, options.final, options.tag)
    with tempfile.TemporaryDirectory() as scratch:
        packages_to_build = {each.name: each for package in chosen for each in with_those_below(package, packages)}
        for command in build_commands(list(packages_to_build.values()), options.out):
            perform(command, ROOT, options.dry_run)
        for torch in cast("list[Torch]", options.torch):
            for package in chosen:
                commands = trial(package, packages, torch, options.out, Path(scratch), options.torch_backend)
                failed |= not run_trial(f"{package.name:24}{package.version:9}{torch:12}", commands, options.dry_run)
    sys.exit(failed)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folders = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"packages: {', '.join(folders)} (default: all)")
    parser.add_argument("--torch", nargs="+", choices=["lowest", "newest"], default=["newest"])
    parser.add_argument("--torch-backend", help="backend for uv, e.g. cpu; torch then comes from a PyTorch index")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--final", action="store_true", help="refuse changelogs with (unreleased)")
    parser.add_argument("--tag", help="the tag of the release, v and its version")
    parser.add_argument("--notes", action="store_true", help="only print the newest section of each changelog")
    parser.add_argument("--dry-run", action="store_true", help="check metadata and show the commands")
    options = parser.parse_args()
    if unknown := set(options.packages) - set(folders):
        parser.error(f"no package {', '.join(sorted(unknown))}; known: {', '.join(folders)}")
    options.out = options.out.resolve()
    return options


def show_statements(chosen: list[Package], packages: list[Package], final: bool, tag: str | None) -> bool:
    """Prints a table of versions and problems. Returns False if there is a problem."""
    print(f"{'package':24}{'version':9}{'changelog':12}stated")
    problems_of = {package.name: problems(package, packages, final, tag) for package in chosen}
    for package in chosen:
        date = heading(package)[1]
        print(
            f"{package.name:24}{package.version:9}{date:12}{'; '.join(problems_of[package.name]) or 'ok'}", flush=True
        )
    return not any(problems_of.values())


def problems(package: Package, packages: list[Package], final: bool = False, tag: str | None = None) -> list[str]:
    """Problems of a package's metadata and changelog; with `final` the changelog must have a date."""
    version, date = heading(package)
    messages = [f"no {key}" for key in sorted(STATED) if not package.project.get(key)]
    if version != package.version:
        messages.append(
            f"the changelog's newest heading is of {version or 'no version'}, the package of {package.version}"
        )
    if tag is not None and tag != f"v{package.version}":
        messages.append(f"the tag is {tag}, the package's version {package.version}")
    if final and date == "unreleased":
        messages.append("the changelog says (unreleased)")
    for other in packages:
        bound = package.bound(other.name)
        # Packages are released together, and take each other in one version: what they share below their faces changes
        # without notice.
        if bound is not None and bound != f"=={other.version}":
            messages.append(f"takes {other.name}{bound}, whose version is {other.version}; write =={other.version}")
    return messages


def heading(package: Package) -> tuple[str, str]:
    """Version and date of the changelog's newest heading, '## 0.2.0 (unreleased)' or '## 0.2.0 (2026-11-30)'."""
    match = HEADING.search(package.changelog)
    return (match[1], match[2]) if match else ("", "")


def newest_section(package: Package) -> str:
    """The changelog's text below its newest heading."""
    first, *others = HEADING.finditer(package.changelog)
    return package.changelog[first.end() : others[0].start() if others else None].strip()


def with_those_below(package: Package, packages: list[Package]) -> list[Package]:
    """The package and all of our packages that it depends on, lowest first."""
    dependencies = [other for other in packages if package.bound(other.name) is not None]
    lists = [*(with_those_below(other, packages) for other in dependencies), [package]]
    return list({each.name: each for each_list in lists for each in each_list}.values())


def build_commands(packages: list[Package], out: Path) -> list[list[str]]:
    # Wheels are built from source distributions, so that missing files show.
    return [["uv", "build", "--quiet", "--package", package.name, "--out-dir", str(out)] for package in packages]


def trial(
    package: Package, packages: list[Package], torch: Torch, wheels: Path, scratch: Path, backend: str | None = None
) -> list[list[str]]:
    """The commands that install `package` into a new environment and test it there. All trials use the same folder, so
    that cached bytecode, which depends on path and time of the source, is reused."""
    python, cache = str(scratch / "env/bin/python"), str(scratch / "bytecode")
    # Wheels by path, because an index may have others of that version. `run_trial` runs outside of any pyproject.toml.
    taken = with_those_below(package, packages)
    requirements = [str(wheels / each.wheel) for each in taken]
    if torch == "lowest":  # of what is named here, so not of what these packages require in turn
        ours = {each.name for each in packages}
        named = {line for each in taken for line in each.project["dependencies"] if name_of(line) not in ours}
        requirements += ["--resolution", "lowest-direct", *sorted(named)]
    requirements += [torch_requirement(package, packages, torch)] + (["--torch-backend", backend] if backend else [])
    smoke = ["-W", f"error:{NUMPY_WARNING}", "-I", str(ROOT / "scripts/smoke.py"), package.name]
    return [
        ["uv", "venv", "--quiet", "--clear", "--no-project", str(scratch / "env")],
        ["uv", "pip", "install", "--quiet", "--python", python, *requirements],
        [python, "-X", f"pycache_prefix={cache}", *smoke],
    ]


def name_of(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0]


def torch_requirement(package: Package, packages: list[Package], torch: Torch) -> str:
    """'torch', or 'torch==2.11.*' for the lowest version allowed by the package and those below it."""
    bounds = [each.bound("torch") or "" for each in with_those_below(package, packages)]
    major, minor = max((int(a), int(b)) for bound in bounds for a, b in re.findall(r">=(\d+)\.(\d+)", bound))
    return "torch" if torch == "newest" else f"torch=={major}.{minor}.*"


def run_trial(title: str, commands: list[list[str]], dry_run: bool) -> bool:
    """Runs a trial's commands in a new folder and prints the last line of their output. Returns False if one failed."""
    last_line = ""
    with tempfile.TemporaryDirectory() as folder:
        for command in commands:
            if dry_run:
                print(shlex.join(command))
                continue
            run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if run.returncode:
                print(f"{title}FAILED: {shlex.join(command)}\n{run.stdout}{run.stderr}", flush=True)
                return False
            last_line = run.stdout.strip().rpartition("\n")[2]
    if not dry_run:
        print(f"{title}{last_line}", flush=True)
    return True


def perform(command: list[str], folder: Path, dry_run: bool) -> None:
    if dry_run:
        print(shlex.join(command))
    else:
        subprocess.run(command, cwd=folder, check=True)


if __name__ == "__main__":
    if shutil.which("uv") is None and "--notes" not in sys.argv:
        sys.exit("scripts/release.py: uv is not installed")
    main()
