"""Context parallelism of many libraries compared with the float64 oracle on CPU ranks, each in its own environment.

    uv run python benchmarks/scoreboard                                      # all; downloads missing packages
    uv run python benchmarks/scoreboard --only "armillary, ring" diffusers   # by name or by prefix
    uv run python benchmarks/scoreboard --only "diffusers, ring" --case window/contiguous/8x8/bfloat16/2

Results replace earlier ones of the same contenders in docs/benchmarks/scoreboard.json and docs/scoreboard.md; a run of
selected cases stores nothing. Exits with 1 if a method of armillary is not right in all cases.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))  # makes the folder `conformance` importable
from contender import HERE, Contender, contenders
from environment import ROOT, environment, variables
from setting import Setting
from table import cell, figures, markdown, outcomes, text

RESULTS, PAGE = ROOT / "docs" / "benchmarks" / "scoreboard.json", ROOT / "docs" / "scoreboard.md"
MARK = "<!-- written by benchmarks/scoreboard: what follows is its table -->\n"


def main() -> int:
    options = parse()
    results: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        for cls in options.chosen:
            cases = [case for case in cls.settings() if not options.case or case in options.case]
            results += [run_contender(cls, cases, Path(folder))] if cases else []
            if options.json:  # after each contender, because a run may be interrupted
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{text(results)}")
    for each in [outcome for one in results for outcome in outcomes(one)] if options.case else []:
        print(f"{each.setting}: {each.outcome} {each.said or figures([each])}")
    if not options.case:
        store(results)
    our_results = [one for one in results if one["name"].startswith("armillary")]
    return int(any(one["why"] or cell(outcomes(one)) != str(len(one["outcomes"])) for one in our_results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    all_contenders = contenders()
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=[], help=f"names or prefixes: {'; '.join(all_contenders)}"
    )
    parser.add_argument(
        "--case", nargs="+", type=Setting.read, default=[], help="settings, e.g. causal/zigzag/8x4/bfloat16/4"
    )
    parser.add_argument("--json", type=Path, help="file for all results")
    options = parser.parse_args()
    named = {
        name: [name] if name in all_contenders else [each for each in all_contenders if each.startswith(name)]
        for name in options.only
    }
    if unknown := [name for name, chosen in named.items() if not chosen]:
        parser.error(f"no contender {', '.join(unknown)}; known: {'; '.join(all_contenders)}")
    requested = {name for chosen in named.values() for name in chosen} or set(all_contenders)
    options.chosen = [cls for name, cls in all_contenders.items() if name in requested]
    return options


def run_contender(cls: type[Contender], cases: Sequence[Setting], folder: Path) -> dict[str, Any]:
    """Runs one contender and prints its result in a line: outcomes of cases, or the reason why it cannot run."""
    date = datetime.now(UTC).date().isoformat()
    result: dict[str, Any] = {
        "name": cls.name,
        "note": cls.note,
        "date": date,
        "versions": {},
        "why": "",
        "outcomes": [],
    }
    print(f"{cls.name:36}", end="", flush=True)
    try:
        for line in lines(cls, cases, folder):
            result |= line if "versions" in line else {}
            result["outcomes"] += [line] if "outcome" in line else []
    except RuntimeError as failure:
        result["why"] = str(failure)
    print(result["why"] or cell(outcomes(result)), flush=True)
    return result


def lines(cls: type[Contender], cases: Sequence[Setting], folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of trial.py. Contenders with equal requirements share a temporary environment in `folder`."""
    python, log = environment(cls, folder), folder / "log.txt"
    command = [python, str(HERE / "trial.py"), cls.name, *map(str, cases)]
    with log.open("w") as errors:
        trial = subprocess.Popen(
            command, env=variables(cls), cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert trial.stdout is not None
    yield from (json.loads(line) for line in trial.stdout if line.startswith('{"'))
    if trial.wait():
        raise RuntimeError(f"trial.py ended with {trial.returncode}: {last_line(log)}")


def last_line(log: Path) -> str:
    return (log.read_text().strip().splitlines() or [""])[-1]


def store(results: Sequence[dict[str, Any]]) -> None:
    """Writes the results as JSON and into the page."""
    before = json.loads(RESULTS.read_text())["contenders"] if RESULTS.exists() else []
    newest = {one["name"]: one for one in (*before, *results)}
    machine = f"Python {platform.python_version()}, {platform.machine()}, gloo on CPU ranks"
    data = {"machine": machine, "contenders": [newest[name] for name in contenders() if name in newest]}
    each_in_a_line = ",\n".join(json.dumps(one) for one in data["contenders"])
    RESULTS.write_text(f'{{"machine": {json.dumps(machine)}, "contenders": [\n{each_in_a_line}\n]}}\n')
    introduction = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(f"{introduction}{MARK}\n{markdown(data)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
