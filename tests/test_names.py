"""The files, modules and attributes that docstrings and pages name are in the tree."""

import ast
import re
import subprocess
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path

from armillary.plan.cluster import Accelerator, Cluster, Link

ROOT = Path(__file__).parent.parent
DOTTED = re.compile(r"\barmillary(?:\.\w+)+")
FILE = re.compile(r"(?<![\w/.>-])((?:[\w.-]+/)*[\w.-]+\.py)\b")
ROW = re.compile(r"^(?: {4})?(\w+)(?:\.py)?  +\S", re.MULTILINE)
"""Matches a row of the table of modules in a package's docstring."""
TITLE = re.compile(r'title="([^"]+)"')
"""Matches the name of a file that a page makes."""


def listed() -> list[Path]:
    """Returns the files in git, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [Path(line) for line in lines if (ROOT / line).is_file()]


FILES = listed()
PAGES = {path: (ROOT / path).read_text() for path in FILES if path.suffix == ".md" and path.name != "CHANGELOG.md"}
DOCSTRINGS = [
    (path, text)
    for path in FILES
    if path.suffix == ".py" and path.parts[0] not in ("tests", "examples") and "tests" not in path.parts
    for node in ast.walk(ast.parse((ROOT / path).read_text()))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node))
]


@cache
def names_of(module: str) -> set[str]:
    """Returns the submodules of a module and the names that it defines or imports; none if there is no such module."""
    file, names = module.replace(".", "/"), set[str]()
    for path in FILES:
        inside = path.as_posix().partition("/src/")[2]
        if inside.startswith(f"{file}/"):
            names.add(inside.removeprefix(f"{file}/").partition("/")[0].removesuffix(".py"))
        if inside in (f"{file}.py", f"{file}/__init__.py"):
            for node in ast.walk(ast.parse((ROOT / path).read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    names.add(node.name)
                elif isinstance(node, ast.alias):
                    names.add(node.asname or node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
    return names


def entry_points() -> set[str]:
    """Returns the groups of entry points that the packages have."""
    projects = [tomllib.loads((ROOT / path).read_text()) for path in FILES if path.name == "pyproject.toml"]
    return {group for project in projects for group in project.get("project", {}).get("entry-points", {})}


def exists(name: str) -> bool:
    """Returns True if a dotted name is a module, or the name of something in one."""
    parts = name.split(".")
    modules = (".".join(parts[:count]) for count in range(1, len(parts)))
    return all(
        not names_of(module) or part in names_of(module) for module, part in zip(modules, parts[1:], strict=True)
    )


def test_dotted_names():
    groups = entry_points()
    named = [(path, name) for path, text in [*DOCSTRINGS, *PAGES.items()] for name in DOTTED.findall(text)]
    assert len(named) > 100
    assert not [(str(path), name) for path, name in named if name not in groups and not exists(name)]


def test_files():
    tree = {"/".join(path.parts[start:]) for path in FILES for start in range(len(path.parts))}
    tree |= {title for text in PAGES.values() for title in TITLE.findall(text)}
    named = [(path, name) for path, text in [*DOCSTRINGS, *PAGES.items()] for name in FILE.findall(text)]
    assert len(named) > 100
    assert not [(str(path), name) for path, name in named if name not in tree]


def test_keys_of_a_cluster():
    keys = {field.name for table in (Cluster, Accelerator, Link) for field in fields(table)} - {"accelerator"}
    page = PAGES[Path("docs/choosing.md")]
    assert not [key for key in keys if f"`{key}`" not in page and f"`[{key}]`" not in page]


def test_modules_of_a_package():
    """The docstring of a package may have a table of its modules, which has no others."""
    rows = [
        (path.parent, name) for path, text in DOCSTRINGS if path.name == "__init__.py" for name in ROW.findall(text)
    ]
    assert len(rows) > 10
    modules = {parent for path in FILES for parent in (path.with_suffix(""), *path.parents)}
    assert not [str(folder / name) for folder, name in rows if folder / name not in modules]
