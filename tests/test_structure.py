"""How files may depend on each other. Read from the source, with imports in functions and under TYPE_CHECKING."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

# What is still there. Whoever removes something takes it out here too; nothing comes in.
CYCLES = list[str]()
SHARED_NAMES = ""

DRIVER = {
    f"armillary.attention.call.{name}" for name in ("attend", "autograd", "calls", "dtensors", "graph_calls", "project")
}
"""What runs a call of any method. `Method.__call__` alone hands a call to it (`methods/base.py`)."""


@cache
def sources() -> dict[str, ast.Module]:
    """The modules of all packages."""
    return {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for source in sorted(Path(__file__).parents[1].glob("packages/*/src"))
        for path in sorted(source.rglob("*.py"))
    }


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of all imports, wherever they stand: under TYPE_CHECKING and in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


@cache
def needs(module: str) -> set[str]:
    """The files that a file imports from: submodules, or the module that has the name, if only to pass it on."""
    actual = {f"{m}.{name}" if f"{m}.{name}" in sources() else m for m, name in imported(sources()[module])}
    return actual & set(sources()) - {module}


@cache
def reached(module: str) -> frozenset[str]:
    """All files that importing this one takes."""
    actual, waiting = set[str](), [module]
    while waiting:
        new = needs(waiting.pop()) - actual
        actual |= new
        waiting += new
    return frozenset(actual)


def line(modules: Iterable[str]) -> str:
    """All of them, as in the lists above."""
    return " ".join(sorted(module.removeprefix("armillary.") for module in modules))


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """(module, class) of all public classes."""
    nodes = ((module, node) for module, tree in sources().items() for node in ast.walk(tree))
    return ((m, node) for m, node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))


def test_no_import_cycles():
    assert len(sources()) > 200
    cycles = {line(other for other in reached(m) if m in reached(other)) for m in sources() if m in reached(m)}
    assert sorted(cycles) == CYCLES


def test_each_class_has_a_name_of_its_own():
    names = Counter(node.name for _, node in classes())
    assert ", ".join(f"{n} {name}" for name, n in sorted(names.items()) if n > 1) == SHARED_NAMES


def test_methods_and_their_driver_do_not_import_each_other():
    methods = {module for module in sources() if module.startswith("armillary.attention.methods.")}
    assert len(methods) > 10
    assert line(m for m in methods if needs(m) & DRIVER) == "attention.methods.base"
    assert not any(methods & reached(module) for module in DRIVER)


def test_rotation_methods_plans_and_registry_depend_one_way():
    folders = ("rotation", "methods", "planning", "registry")
    layers = [{module for module in sources() if f"{module}.".startswith(f"armillary.attention.{f}.")} for f in folders]
    for lower, upper in combinations(layers, 2):
        assert lower and upper
        assert line(module for module in lower if reached(module) & upper) == ""
