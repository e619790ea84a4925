"""Builds the docs of this commit and of the releases into site/, each in a folder of its own, with a menu of versions.

    python scripts/site.py        # site/dev, and site/0.3 of the newest tag v0.3.*; the start page leads to the newest

Each version is built from its own files, by the pinned version of the builder that they name.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ("uv", "run", "--only-group", "docs", "zensical", "build", "--strict")


def main(repository: Path = ROOT, build: Sequence[str] = BUILD) -> None:
    site = repository / "site"
    shutil.rmtree(site, ignore_errors=True)
    tags = newest_of_minors(git(repository, "tag", "--list", "v*").split())
    for version, revision in {**tags, "dev": "HEAD"}.items():
        print(f"{version}: {revision}", flush=True)
        with tempfile.TemporaryDirectory() as name:
            extract(repository, revision, folder := Path(name))
            subprocess.run(build, cwd=folder, check=True)
            shutil.move(folder / "site", site / version)
    write_menu(site, tags)


def newest_of_minors(tags: Iterable[str]) -> dict[str, str]:
    """Returns the newest tag of each minor version, {"0.3": "v0.3.1"}, newest first."""
    numbers = sorted(tuple(map(int, tag[1:].split("."))) for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+", tag))
    newest = {f"{major}.{minor}": f"v{major}.{minor}.{patch}" for major, minor, patch in numbers}
    return dict(reversed(newest.items()))


def write_menu(site: Path, tags: dict[str, str]) -> None:
    """Writes versions.json, which pages show as a menu, and the start page, which leads to the newest release."""
    versions = [{"version": version, "title": tag[1:], "aliases": []} for version, tag in tags.items()]
    versions.append({"version": "dev", "title": "dev", "aliases": []})
    start = versions[0]["version"]
    versions[0]["aliases"] = ["latest"]
    (site / "versions.json").write_text(json.dumps(versions))
    (site / "index.html").write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={start}/">\n')


def extract(repository: Path, revision: str, folder: Path) -> None:
    """Writes the files of a commit into a folder."""
    archive = folder / "archive.tar"
    git(repository, "archive", f"--output={archive}", revision)
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    archive.unlink()


def git(repository: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=repository, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    if shutil.which("uv") is None:
        sys.exit("scripts/site.py: uv is not installed")
    main()
