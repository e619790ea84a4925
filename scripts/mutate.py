"""Breaks the code in one place at a time, as a bug would, and says which test notices.

Mutations stand in `mutations.toml`. Each is applied to a copy of the workspace, where first the tests run that most
likely notice it, then the others of its package and those of `tests/`, until one fails or all have passed.

    uv run python scripts/mutate.py                     # all; up to an hour on two cores
    uv run python scripts/mutate.py --likely            # only the likely tests
    uv run python scripts/mutate.py --only NAME [NAME]  # some of them
    uv run python scripts/mutate.py --unmutated         # the likely tests of the code as it is: they must pass

Exit code 1 if a mutation survived.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
MUTATIONS = Path(__file__).with_name("mutations.toml")
LIKELY_SECONDS, OTHERS_SECONDS = 900.0, 2400.0
"""How long tests may run. A mutation that has them hang is noticed too; test worlds end by themselves in 300 s."""
NO_TESTS = 5
"""pytest's exit code."""


@dataclass(frozen=True)
class Mutation:
    """One change of the code.

    Args:
        package: whose tests are to notice.
        file: relative to the root.
        old, new: what is replaced, which occurs once, and by what.
        breaks: what is wrong then.
        likely: test files, or tests as file::name, in the order in which they run.
    """

    name: str
    package: str
    file: str
    old: str
    new: str
    breaks: str
    likely: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The file's text with the change.

        Raises:
            ValueError: `old` is not there, or more than once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: its old text occurs {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What came of a run of tests, or of a mutation.

    Args:
        caught: whether something failed, or did not end in time.
        by: the test that failed first.
        seconds: that it took.
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
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutations")
    parser.add_argument("--likely", action="store_true", help="run the tests that most likely notice, and no others")
    parser.add_argument("--unmutated", action="store_true", help="run the likely tests of the code as it is")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutations at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there too")
    return parser


def load(path: Path) -> list[Mutation]:
    """The mutations in a TOML file."""
    found: list[dict[str, Any]] = tomllib.loads(path.read_text())["mutation"]
    return [mutation_of(each) for each in found]


def mutation_of(fields: dict[str, Any]) -> Mutation:
    fields["likely"] = tuple(fields["likely"])
    return Mutation(**fields)


# -- running ----------------------------------------------------------------------------------------------------------


def run_all(mutations: Sequence[Mutation], jobs: int, likely: bool) -> list[Outcome]:
    """What comes of each, told as it comes; so many at a time, each job in a copy of its own."""
    free: SimpleQueue[Path] = SimpleQueue()

    def one(mutation: Mutation) -> Outcome:
        root = free.get()
        try:
            outcome = tried(root, mutation, likely, workers=2 if jobs == 1 else 0)
        finally:
            free.put(root)
        print(line(mutation, outcome), flush=True)
        return outcome

    with ExitStack() as stack:
        for _ in range(jobs):
            free.put(stack.enter_context(workspace()))
        return list(stack.enter_context(ThreadPoolExecutor(jobs)).map(one, mutations))


def tried(root: Path, mutation: Mutation, likely: bool, workers: int = 0) -> Outcome:
    """Which test notices the mutation: of those that likely do, then of all others."""
    others = [f"packages/{mutation.package}/tests", "tests"]
    known = [f"--ignore={name}" for name in mutation.likely if "::" not in name]
    with mutated(root, mutation):
        first = run_tests(root, mutation.likely, LIKELY_SECONDS)
        if first.caught or likely:
            return first
        second = run_tests(root, [*others, *known, "-n", str(workers)], OTHERS_SECONDS)
    return replace(second, seconds=first.seconds + second.seconds)


def run_tests(root: Path, arguments: Sequence[str], limit: float) -> Outcome:
    """Runs pytest in a copy until something fails. Whatever it has started is ended with it.

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
    """The first test that failed, or the last line where none could be run."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return found[1] if found else (output.strip().splitlines() or [""])[-1]


def unmutated(mutations: Sequence[Mutation]) -> int:
    """Runs each likely test once, in a copy of the code as it is; the exit code."""
    tests = dict.fromkeys(name for mutation in mutations for name in mutation.likely)
    with workspace() as root:
        outcome = run_tests(root, list(tests), OTHERS_SECONDS)
    print(f"{outcome.by} fails without any mutation" if outcome.caught else f"all pass, {outcome.seconds:.0f} s")
    return int(outcome.caught)


@contextmanager
def workspace() -> Generator[Path]:
    """A copy of the files that git knows or would add, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    with TemporaryDirectory(prefix="mutate-") as folder:
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():  # not one that was just removed
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name)
        yield Path(folder)


@contextmanager
def mutated(root: Path, mutation: Mutation) -> Generator[None]:
    """Meanwhile the copy has the change."""
    path = root / mutation.file
    text = path.read_text()
    try:
        write(path, mutation.applied(text))
        yield
    finally:
        write(path, text)


def write(path: Path, text: str) -> None:
    """Writes source; bytecode goes by seconds and sizes, which may be those of the text before."""
    path.write_text(text)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


# -- telling ----------------------------------------------------------------------------------------------------------


def line(mutation: Mutation, outcome: Outcome) -> str:
    word = "caught" if outcome.caught else "SURVIVED"
    return f"{word:8} {outcome.seconds:5.0f} s  {mutation.name:32} {outcome.by if outcome.caught else mutation.breaks}"


def report(mutations: Sequence[Mutation], outcomes: Sequence[Outcome], path: Path | None) -> int:
    """Prints a summary, and writes all there is to know; the exit code."""
    pairs = list(zip(mutations, outcomes, strict=True))
    survivors = [mutation.name for mutation, outcome in pairs if not outcome.caught]
    print(f"{len(pairs) - len(survivors)} of {len(pairs)} caught, {sum(o.seconds for o in outcomes):.0f} s of tests")
    if survivors:
        print(f"survived: {' '.join(survivors)}")
    if path is not None:
        rows = [
            {"name": m.name, "package": m.package, "file": m.file, "breaks": m.breaks, **asdict(o)} for m, o in pairs
        ]
        path.write_text(json.dumps({"caught": len(pairs) - len(survivors), "mutations": rows}, indent=1) + "\n")
    return int(bool(survivors))


if __name__ == "__main__":
    main()
