"""Checks the public interface: against that of the last release, and that all of its types are stated.

Public are the names in `__all__` of the packages' faces and of `SUB_FACES` (docs/stability.md). Exits with 1 if

- a public name is gone or takes other arguments than in the last release, and the newest section of its package's
  CHANGELOG does not name it;
- with `--types`, a type in the public interface is not stated, so that a type checker must infer it.

    uv run python scripts/interface.py                  # against the newest tag; says so if there is none
    uv run python scripts/interface.py --against HEAD~9 # against another commit
    uv run python scripts/interface.py --types          # also types, by pyright
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import griffe
from release import Package, newest_section

ROOT = Path(__file__).parent.parent
SUB_FACES = (
    "armillary.attention.context_parallel",
    "armillary.attention.post_training",
    "armillary.check.plugin",
    "armillary.core.testing",
    "armillary.models.block",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="a commit to compare with (default: the newest tag v*)")
    parser.add_argument("--types", action="store_true", help="also check that all types are stated")
    options = parser.parse_args()
    messages = list[str]()
    before = options.against or newest_tag()
    if before is None:
        print("no tag v*: there is no release to compare with")
    else:
        with tempfile.TemporaryDirectory() as folder:
            archive = git("archive", before, "packages")
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(folder, filter="data")
            changes = list(breakages(read_faces(Path(folder)), read_faces(ROOT)))
        messages += sorted({f"{change}; no CHANGELOG names it" for name, change in changes if not is_stated(name)})
        print(f"{len(changes)} breaking changes since {before}, {len(messages)} not in a CHANGELOG")
    if options.types:
        messages += unstated_types(read_faces(ROOT))
    print("\n".join(messages))
    sys.exit(bool(messages))


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def newest_tag() -> str | None:
    """The newest release before this commit, which may be tagged itself."""
    options = ("--list", "v*", "--sort=-version:refname", "--merged", "HEAD", "--no-contains", "HEAD")
    tags = git("tag", *options).decode().split()
    return tags[0] if tags else None


# -- changes ----------------------------------------------------------------------------------------------------------

Faces = dict[str, dict[str, griffe.Object]]
"""The public names of each face, with the classes, functions and values that they stand for."""


def read_faces(root: Path) -> Faces:
    """Returns the public names of the packages in a checkout, without importing them."""
    loader = griffe.GriffeLoader(search_paths=[str(path) for path in sorted(root.glob("packages/*/src"))])
    packages = [f"armillary.{path.name}" for path in sorted(root.glob("packages/*/src/armillary/*")) if path.is_dir()]
    for package in packages:
        loader.load(package)
    loader.resolve_aliases(implicit=True, external=False)
    faces: Faces = {}
    for name in (*packages, *SUB_FACES):
        try:
            module = loader.modules_collection[name]
        except KeyError:  # this checkout does not have it
            continue
        own = [key for key, member in module.members.items() if not member.is_alias and not key.startswith("_")]
        names = [str(key) for key in module.exports or own if key != "__version__"]
        faces[name] = {key: resolved(module.members[key]) for key in names}
    return faces


def resolved(member: griffe.Object | griffe.Alias) -> griffe.Object:
    return member.final_target if isinstance(member, griffe.Alias) else member


def module_of(object_: griffe.Object) -> griffe.Module:
    """Returns a module with one member: griffe compares members only."""
    module = griffe.Module("face")
    module.members["name"] = object_
    return module


def breakages(before: Faces, after: Faces) -> Iterator[tuple[str, str]]:
    """Yields (name that a CHANGELOG must state, description) for each breaking change."""
    for face, names in before.items():
        for name, old in names.items():
            new = after.get(face, {}).get(name)
            if new is None:
                yield name, f"{face}.{name} is gone"
                continue
            for change in griffe.find_breaking_changes(module_of(old), module_of(new)):
                member = change.obj.name
                is_own = member in (name, "__init__")  # otherwise a method or attribute, perhaps of a base class
                label = name if is_own else f"{name}.{member}"
                yield name if is_own else member, f"{face}.{label}: {change.kind.value.lower()}"


def is_stated(name: str) -> bool:
    """Returns True if the newest section of a CHANGELOG has this name as code."""
    sections = [newest_section(Package.read(path.parent)) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    return any(re.search(rf"`[^`]*\b{re.escape(name)}\b[^`]*`", section) for section in sections)


# -- types ------------------------------------------------------------------------------------------------------------


def unstated_types(faces: Faces) -> Iterator[str]:
    """Yields a line for each type of the public names that is not stated, so that a type checker must infer it.

    "partially unknown" is not counted: it means attributes of an inner class, or a base class of another package.
    pyright's strict mode, which runs on the same sources, reports the unknown types of our own.
    """
    targets = {object_.path for names in faces.values() for object_ in names.values()}
    for package in sorted({".".join(face.split(".")[:2]) for face in faces}):
        command = ["pyright", "--verifytypes", package, "--ignoreexternal", "--outputjson"]
        report = json.loads(subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True).stdout)
        symbols = report["typeCompleteness"]["symbols"]
        for symbol in (symbol for symbol in symbols if symbol["name"].startswith(f"{package}.")):
            owners = {symbol["name"].rsplit(".", dots)[0] for dots in range(3)}  # itself, its class, its method's class
            for diagnostic in symbol["diagnostics"] if owners & targets else ():
                message = " ".join(diagnostic["message"].split())
                # What a base class states is known: an override need not repeat it.
                known = re.search("base class override|partially unknown|metaclass unknown", message)
                if diagnostic["severity"] == "error" and not known:
                    yield f"{symbol['name']}: {message}"


if __name__ == "__main__":
    main()
