"""Rules for imports between files. Imports in functions and under TYPE_CHECKING count too."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

# Known violations. Remove an entry with its violation; add none.
CYCLES = list[str]()
SHARED_NAMES = ""

DRIVER = {f"armillary.attention.call.{name}" for name in ("autograd", "calls", "dtensors")}
"""The modules that run a call of any method. Only `Method.__call__` (`methods/base.py`) calls them."""

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


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yields (module, class) of all public classes."""
    nodes = ((module, node) for module, tree in sources().items() for node in ast.walk(tree))
    return ((m, node) for m, node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))


def test_no_import_cycles():
    assert len(sources()) > 200
    cycles = {line(other for other in reached(m) if m in reached(other)) for m in sources() if m in reached(m)}
    assert sorted(cycles) == CYCLES


def test_class_names_are_unique():
    names = Counter(node.name for _, node in classes())
    assert ", ".join(f"{n} {name}" for name, n in sorted(names.items()) if n > 1) == SHARED_NAMES


def test_methods_and_their_driver_do_not_import_each_other():
    methods = {module for module in sources() if module.startswith("armillary.attention.methods.")}
    assert len(methods) > 8
    assert line(m for m in methods if needs(m) & DRIVER) == "attention.methods.base"
    assert not any(methods & reached(module) for module in DRIVER)


def test_rotation_methods_plans_and_registry_depend_one_way():
    folders = ("rotation", "methods", "comm_plans", "registry")
    layers = [{module for module in sources() if f"{module}.".startswith(f"armillary.attention.{f}.")} for f in folders]
    for lower, upper in combinations(layers, 2):
        assert lower and upper
        assert line(module for module in lower if reached(module) & upper) == ""


def test_files_are_read_by_functions_that_cannot_hang():
    readers = {
        module.removeprefix("armillary.") for module, tree in sources().items() if READS.search(ast.unparse(tree))
    }
    assert readers == set(OTHER_FILES)
