"""The suite by one command: the full product of methods and cases, or cases at random, with the result as a table.

With --random N, case i of seed S is the same whatever else is asked for; `--seed S --case i` tries it alone.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from armillary.attention.conformance.case import Case
from armillary.attention.conformance.compositions import METHODS, Composition, compositions
from armillary.attention.conformance.draw import RANKS, Trial, drawn
from armillary.attention.conformance.report import KINDS_OF_CASES, Report
from armillary.attention.conformance.run import run
from armillary.attention.conformance.sample import DTYPES, product_cases
from armillary.core.testing import World


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; 1 if anything failed."""
    options = _options(arguments)
    at_random = options.random is not None or options.case is not None
    trials = _drawn(options) if at_random else _product(options)
    ranks = max(RANKS) if at_random else max((trial.composition.ranks for trial in trials), default=1)
    report = Report(len(trials), at_random, options.json)
    with World(ranks) as world:
        for trial, verdict in run(world, trials):
            report.add(trial, verdict)
    report.show(list(METHODS))
    return int(bool(report.failures))


def _drawn(options: Namespace) -> list[Trial]:
    """Of cases at random, those of the methods, ranks, dtypes and kinds that are asked for."""
    indices = range(options.random) if options.case is None else options.case
    trials = [drawn(options.seed, index) for index in indices]
    return [
        trial
        for trial in trials
        if trial.composition.method in options.methods
        and (options.ranks is None or trial.composition.ranks in options.ranks)
        and trial.case.dtype in options.dtypes
        and all(KINDS_OF_CASES[kind](trial) for kind in options.kind)
    ]


def _product(options: Namespace) -> list[Trial]:
    chosen = compositions(options.methods, options.ranks or [1, 2, 4])
    cases = list(product_cases(options.seed, options.dtypes))
    return [Trial(composition, case) for composition in chosen for case in cases if fits(composition, case)]


def fits(composition: Composition, case: Case) -> bool:
    """Whether there is a head for each rank of the head axis: fewer are refused."""
    return case.heads >= dict(composition.axes).get("ulysses", 1)


def _options(arguments: Sequence[str] | None) -> Namespace:
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    parser = ArgumentParser("python -m armillary.attention.conformance", description=__doc__)
    parser.add_argument("--random", type=_count, metavar="N", help="so many cases at random instead of the product")
    parser.add_argument("--case", type=_count, nargs="+", metavar="I", help="only these of the cases at random")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at random")
    parser.add_argument("--ranks", type=int, nargs="+", help="only these numbers of ranks; of the product: 1 2 4")
    parser.add_argument("--method", nargs="+", default=["all"], choices=[*METHODS, "all"])
    parser.add_argument("--dtype", nargs="+", default=list(dtypes), choices=list(dtypes))
    only = "of the cases at random, only those of all these kinds, such as dtensors compiled"
    parser.add_argument("--kind", nargs="+", default=[], choices=list(KINDS_OF_CASES), help=only)
    parser.add_argument("--json", type=Path, help="a file for the result")
    options = parser.parse_args(arguments)
    options.dtypes = [dtypes[name] for name in options.dtype]
    options.methods = list(METHODS) if "all" in options.method else options.method
    return options


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError(f"{text} is below 0")
    return count
