"""Rules for imports between files. Imports in functions and under TYPE_CHECKING count too."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

# Known violations. Remove an entry with its violation; add none.
CYCLES = list[str]()

READS = re.compile(r"\.(read_text|read_bytes)\(|\.open\(('rb?')?\)|(?<![\w.])open\([^)]*'rb?'|copyfile\(")
"""Matches calls that read a file, or a copy of one."""

OTHER_FILES = {
    "core.files": "the functions that all others use",
    "core.mesh": "/proc",
    "core.testing.world": "a file of the same test",
    "train.generate": "a prompt, which may be a pipe",
}
"""The modules that read files without `armillary.core.files`, with the reason."""


@cache
def sources() -> dict[str, ast.Module]:
    """The modules of all packages."""
    return {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for source in sorted(Path(__file__).parents[1].glob("packages/*/src"))
        for path in sorted(source.rglob("*.py"))
    }


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields (module, name) of all imports, also of those in functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


@cache
def needs(module: str) -> set[str]:
    """Returns the modules that a module imports from, direct imports only."""
    actual = {f"{m}.{name}" if f"{m}.{name}" in sources() else m for m, name in imported(sources()[module])}
    return actual & set(sources()) - {module}


@cache
def reached(module: str) -> frozenset[str]:
    """Returns the transitive imports of a module."""
    actual, waiting = set[str](), [module]
    while waiting:
        new = needs(waiting.pop()) - actual
        actual |= new
        waiting += new
    return frozenset(actual)


def line(modules: Iterable[str]) -> str:
    """Returns module names in the format of the lists above."""
    return " ".join(sorted(module.removeprefix("armillary.") for module in modules))


def test_no_import_cycles():
    assert len(sources()) > 200
    cycles = {line(other for other in reached(m) if m in reached(other)) for m in sources() if m in reached(m)}
    assert sorted(cycles) == CYCLES


def test_files_are_read_by_functions_that_cannot_hang():
    readers = {
        module.removeprefix("armillary.") for module, tree in sources().items() if READS.search(ast.unparse(tree))
    }
    assert readers == set(OTHER_FILES)
