"""Plants one bug at a time and reports the first test that fails.

Mutations are in `mutations.toml`. Each is applied to a copy of the workspace, where first the likely tests run, then
the tests of its package and of `tests/`, until one fails or all have passed.

    uv run python scripts/mutate.py                     # all; up to an hour on two cores
    uv run python scripts/mutate.py --likely            # only the likely tests
    uv run python scripts/mutate.py --only NAME [NAME]  # only these mutations
    uv run python scripts/mutate.py --unmutated         # the likely tests without mutations: they must pass

Exits with 1 if a mutation survives, or a test fails without mutations.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import cache_from_source
from itertools import repeat
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

Match = tuple[ast.AST, str, int | slice | None, dict[str, Any]]
"""A node, its field, the index in a list field, and the code that the pattern's names and `...` stand for."""

DEFINITION = ast.FunctionDef | ast.ClassDef
ROOT = Path(__file__).parent.parent
MUTATIONS = Path(__file__).with_name("mutations.toml")
LIKELY_SECONDS, OTHERS_SECONDS = 900.0, 2400.0
"""Time limits of tests. A mutation that makes them hang is caught too; test worlds time out after 300 s."""
NO_TESTS = 5
"""pytest's exit code if it collects no tests."""


@dataclass(frozen=True)
class Mutation:
    """One change of the code, as a syntax pattern, which survives reformatting, renamed variables and moved files.

    Args:
        package: package whose tests must fail.
        function: qualified name of the function or class around it, "" at the top level of a module.
        old: one expression, or consecutive statements. `_A` to `_Z` stand for any expression, and `...` as the body of
            a statement for any body.
        new: the replacement, in which `_A` to `_Z` are the same expressions, and `...` is the same body.
        breaks: the resulting bug, in words.
        likely: test files, or tests as file::name, in the order in which they run.
    """

    name: str
    package: str
    function: str
    old: str
    new: str
    breaks: str
    likely: tuple[str, ...]

    def locate(self, root: Path) -> Path:
        """Returns the only source file with the old code.

        Raises:
            ValueError: the code occurs several times or not at all.
        """
        scopes = definitions(root).get(self.function, [])
        paths = [path for path, scope in scopes for _ in matches(self.patterns()[0], scope)]
        if len(paths) != 1:
            places = ", ".join(str(path.relative_to(root)) for path in paths) or "nowhere"
            raise ValueError(f"{self.name}: {self.old!r} occurs {len(paths)} times in {self.function!r}: {places}")
        return paths[0]

    def apply(self, path: Path) -> str:
        """Returns the changed source of a file, without comments.

        Raises:
            SyntaxError: it does not compile, so that every test would fail.
        """
        tree = ast.parse(path.read_text())
        old, new = self.patterns()
        scopes = [scope for name, scope in scopes_of(tree) if name == self.function]
        ((container, field, place, bound),) = [match for scope in scopes for match in matches(old, scope)]
        nodes = [Substitution(bound).visit(node) for node in new]
        if isinstance(place, slice):
            getattr(container, field)[place] = nodes or [ast.Pass()]
        elif place is None:
            setattr(container, field, nodes[0])
        else:
            getattr(container, field)[place] = nodes[0]
        changed = ast.unparse(ast.fix_missing_locations(tree))
        compile(changed, path.name, "exec")
        return changed

    def patterns(self) -> list[list[Any]]:
        """Returns the nodes of `old` and `new`: two expressions, or two lists of statements."""
        bodies: list[list[Any]] = [ast.parse(code).body for code in (self.old, self.new)]
        if all(len(body) == 1 and isinstance(body[0], ast.Expr) for body in bodies):
            return [[body[0].value] for body in bodies]
        return bodies


class Substitution(ast.NodeTransformer):
    """Replaces `_A` to `_Z` and `...` in the new code by the matched expressions and the matched body."""

    def __init__(self, bound: dict[str, Any]) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.bound.get(node.id, node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        return self.bound["..."] if is_any_body([node]) else self.generic_visit(node)


@cache
def definitions(root: Path) -> dict[str, list[tuple[Path, ast.AST]]]:
    """Returns modules, classes and functions of all packages by qualified name; that of modules is empty."""
    table: dict[str, list[tuple[Path, ast.AST]]] = {}
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        for name, scope in scopes_of(ast.parse(path.read_text())):
            table.setdefault(name, []).append((path, scope))
    return table


def scopes_of(scope: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yields a scope and all nested ones with their qualified names (without `<locals>`)."""
    yield name, scope
    for node in own_nodes(scope):
        if isinstance(node, DEFINITION):
            yield from scopes_of(node, f"{name}.{node.name}".lstrip("."))


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a scope, without the bodies of nested definitions."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, DEFINITION):
            yield from own_nodes(node)


def matches(old: list[Any], scope: ast.AST) -> Iterator[Match]:
    """Yields the matches of a pattern in a scope."""
    for container in [scope, *(node for node in own_nodes(scope) if not isinstance(node, DEFINITION))]:
        for field, value in ast.iter_fields(container):
            if isinstance(old[0], ast.expr):
                places = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
                candidates = [(place, [node]) for place, node in places if isinstance(node, ast.expr)]
            else:
                starts = range(len(value) - len(old) + 1) if isinstance(value, list) else ()
                candidates = [(slice(i, i + len(old)), value[i : i + len(old)]) for i in starts]
            for place, nodes in candidates:
                bound: dict[str, Any] = {}
                if same_syntax(old, nodes, bound):
                    yield container, field, place, bound


def is_any_body(statements: list[Any]) -> bool:
    """Returns True for the statement `...` alone."""
    return len(statements) == 1 and isinstance(statements[0], ast.Expr) and ast.unparse(statements[0]) == "..."


def same_syntax(old: Any, node: Any, bound: dict[str, Any]) -> bool:
    """Compares syntax except positions. Records the code of `_A` to `_Z` and `...` in `bound`."""
    if isinstance(old, ast.Name) and re.fullmatch("_[A-Z]", old.id) and isinstance(node, ast.expr):
        return same_syntax(bound.setdefault(old.id, node), node, {})
    if isinstance(old, ast.expr_context):
        return isinstance(node, ast.expr_context)
    if isinstance(old, list) and is_any_body(old):
        bound["..."] = node
        return isinstance(node, list)
    if isinstance(old, list):
        return isinstance(node, list) and len(old) == len(node) and all(map(same_syntax, old, node, repeat(bound)))
    if isinstance(old, ast.AST):
        return type(old) is type(node) and all(
            same_syntax(getattr(old, f), getattr(node, f), bound) for f in old._fields
        )
    return type(old) is type(node) and old == node


@dataclass(frozen=True)
class Outcome:
    """Result of a run of tests, or of a mutation.

    Args:
        caught: True if a test failed or the run exceeded its time limit.
        by: the first failed test.
        seconds: duration.
    """

    caught: bool
    by: str = ""
    seconds: float = 0.0


def main() -> None:
    options = arguments().parse_args()
    mutations = load(MUTATIONS)
    if unknown := sorted(set(options.only or ()) - {mutation.name for mutation in mutations}):
        sys.exit(f"no mutation {', '.join(unknown)}; --list shows them")
    chosen = [mutation for mutation in mutations if not options.only or mutation.name in options.only]
    if options.list:
        print("\n".join(f"{m.name:32} {m.package:10} {m.breaks}" for m in chosen))
    elif options.unmutated:
        sys.exit(unmutated(chosen))
    else:
        sys.exit(report(chosen, run_all(chosen, options.jobs, options.likely), options.json))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the mutations and stop")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these mutations")
    parser.add_argument("--likely", action="store_true", help="run only the likely tests")
    parser.add_argument("--unmutated", action="store_true", help="run the likely tests without mutations")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutations at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to this file too")
    return parser


def load(path: Path) -> list[Mutation]:
    """Reads the mutations of a TOML file."""
    tables: list[dict[str, Any]] = tomllib.loads(path.read_text())["mutation"]
    return [mutation_of(each) for each in tables]


def mutation_of(fields: dict[str, Any]) -> Mutation:
    fields["likely"] = tuple(fields["likely"])
    return Mutation(**fields)


# -- running ----------------------------------------------------------------------------------------------------------


def run_all(mutations: Sequence[Mutation], jobs: int, likely: bool) -> list[Outcome]:
    """Runs all mutations and prints each outcome; `jobs` run in parallel, each in its own copy of the workspace."""
    free: SimpleQueue[Path] = SimpleQueue()

    def one(mutation: Mutation) -> Outcome:
        root = free.get()
        try:
            outcome = run_mutation(root, mutation, likely, workers=2 if jobs == 1 else 0)
        finally:
            free.put(root)
        print(line(mutation, outcome), flush=True)
        return outcome

    with ExitStack() as stack:
        for _ in range(jobs):
            free.put(stack.enter_context(workspace()))
        return list(stack.enter_context(ThreadPoolExecutor(jobs)).map(one, mutations))


def run_mutation(root: Path, mutation: Mutation, likely: bool, workers: int = 0) -> Outcome:
    """Runs the likely tests on a mutation, then all others, until one fails."""
    all_tests = [f"packages/{mutation.package}/tests", "tests"]
    ignored = [f"--ignore={name}" for name in mutation.likely if "::" not in name]
    with mutated(root, mutation):
        first = run_tests(root, mutation.likely, LIKELY_SECONDS)
        if first.caught or likely:
            return first
        second = run_tests(root, [*all_tests, *ignored, "-n", str(workers)], OTHERS_SECONDS)
    return replace(second, seconds=first.seconds + second.seconds)


def run_tests(root: Path, arguments: Sequence[str], limit: float) -> Outcome:
    """Runs pytest in a copy until a test fails. Kills its child processes at the end.

    Raises:
        RuntimeError: there were no tests.
    """
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    sources = os.pathsep.join(str(source) for source in sorted(root.glob("packages/*/src")))
    start, output = time.monotonic(), root / "mutate.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=root, env=os.environ | {"PYTHONPATH": sources}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return Outcome(True, f"did not end in {limit:.0f} s", time.monotonic() - start)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == NO_TESTS:
        raise RuntimeError(f"there are no tests: pytest {' '.join(arguments)}")
    by = failed_test(output.read_text(errors="replace")) if code else ""
    return Outcome(code != 0, by, time.monotonic() - start)


def failed_test(output: str) -> str:
    """The first failed test, or the last line of the output if no test ran."""
    match = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return match[1] if match else (output.strip().splitlines() or [""])[-1]


def unmutated(mutations: Sequence[Mutation]) -> int:
    """Runs each likely test once on an unchanged copy. Returns the exit code."""
    tests = dict.fromkeys(name for mutation in mutations for name in mutation.likely)
    with workspace() as root:
        outcome = run_tests(root, list(tests), OTHERS_SECONDS)
    print(f"{outcome.by} fails without any mutation" if outcome.caught else f"all pass, {outcome.seconds:.0f} s")
    return int(outcome.caught)


@contextmanager
def workspace() -> Generator[Path]:
    """Context manager with a copy of all files that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    with TemporaryDirectory(prefix="mutate-") as folder:
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():  # skips files removed since the last commit
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name)
        yield Path(folder)


@contextmanager
def mutated(root: Path, mutation: Mutation) -> Generator[None]:
    """Context manager that applies the mutation to the copy."""
    path = mutation.locate(root)
    text = path.read_text()
    try:
        write(path, mutation.apply(path))
        yield
    finally:
        write(path, text)


def write(path: Path, text: str) -> None:
    """Writes source and removes its bytecode, whose check by seconds and size could miss the change."""
    path.write_text(text)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


# -- reports ----------------------------------------------------------------------------------------------------------


def line(mutation: Mutation, outcome: Outcome) -> str:
    word = "caught" if outcome.caught else "SURVIVED"
    return f"{word:8} {outcome.seconds:5.0f} s  {mutation.name:32} {outcome.by if outcome.caught else mutation.breaks}"


def report(mutations: Sequence[Mutation], outcomes: Sequence[Outcome], path: Path | None) -> int:
    """Prints a summary and writes all outcomes to `path`. Returns the exit code."""
    pairs = list(zip(mutations, outcomes, strict=True))
    survivors = [mutation.name for mutation, outcome in pairs if not outcome.caught]
    print(f"{len(pairs) - len(survivors)} of {len(pairs)} caught, {sum(o.seconds for o in outcomes):.0f} s of tests")
    if survivors:
        print(f"survived: {' '.join(survivors)}")
    if path is not None:
        rows = [
            {"name": m.name, "package": m.package, "function": m.function, "breaks": m.breaks, **asdict(o)}
            for m, o in pairs
        ]
        path.write_text(json.dumps({"caught": len(pairs) - len(survivors), "mutations": rows}, indent=1) + "\n")
    return int(bool(survivors))


if __name__ == "__main__":
    main()
