"""Holds attention methods to a float64 oracle: the full product of methods and cases, or cases at random.

Five ways to start:
  # all methods in all cases, on 1, 2 and 4 ranks, with the result as a file too
  python -m conformance --json conformance.json
  # one method on two ranks, in one dtype
  python -m conformance --method ring --ranks 2 --dtype float64
  # cases at random: any that can be drawn
  python -m conformance --random 2k --seed 1
  # one of these again, by the line that a failure prints
  python -m conformance --seed 1 --case 172
  # on one GPU, which all ranks share
  python -m conformance --device cuda --ranks 4 --dtype bfloat16

With --random N, case i of seed S is the same whatever else is asked for.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import torch

from armillary.core.testing import World
from armillary.core.testing.staged import STAGED
from armillary.data.console.quantity import count_argument
from conformance.case import Case
from conformance.compositions import METHODS, Composition, compositions
from conformance.draw import RANKS, Trial, drawn
from conformance.report import KINDS_OF_CASES, Report
from conformance.run import run
from conformance.sample import DTYPES, product_cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; 1 if anything failed, 2 where there is no such device."""
    options = parsed(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: no GPU is here", file=sys.stderr)
        return 2
    at_random = options.random is not None or options.case is not None
    trials = _drawn(options) if at_random else _product(options)
    ranks = max(RANKS) if at_random else max((trial.composition.ranks for trial in trials), default=1)
    report = Report(len(trials), at_random, options.json)
    with World(ranks, backend=options.backend) as world:
        for trial, verdict in run(world, trials, options.device):
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


def parsed(arguments: Sequence[str] | None) -> Namespace:
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    program = "python -m conformance"
    parser = ArgumentParser(program, f"{program} [options]", __doc__, formatter_class=RawDescriptionHelpFormatter)
    add, number, count = parser.add_argument, count_argument(0), count_argument()
    add("--random", type=number, metavar="N", help="so many cases at random instead of the product")
    add("--case", type=number, nargs="+", metavar="I", help="only these of the cases at random")
    add("--seed", type=number, default=0, metavar="S", help="of what is drawn at random (default: 0)")
    add("--ranks", type=count, nargs="+", metavar="N", help="only these numbers of ranks; of the product: 1 2 4")

    def add_choices(flag: str, default: list[str], known: list[str], what: str) -> None:
        text = f"{what}: {', '.join(known)}"
        add(flag, nargs="+", default=default, choices=known, metavar=flag[2:].upper(), help=text)

    add_choices("--method", ["all"], [*METHODS, "all"], "only these methods")
    add_choices("--dtype", list(dtypes), list(dtypes), "only these dtypes")
    add_choices("--kind", [], list(KINDS_OF_CASES), "of the cases at random, only those of all these kinds")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors are (default: cpu)")
    add(
        "--backend", choices=("gloo", STAGED), help="of ranks: by default gloo, or staged on cuda, by the host's memory"
    )
    add("--json", type=Path, metavar="FILE", help="a file for the result")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and options.backend == "gloo":
        parser.error("--device cuda: needs --backend staged, which is the default there")
    options.backend = options.backend or (STAGED if options.device == "cuda" else "gloo")
    options.dtypes = [dtypes[name] for name in options.dtype]
    options.methods = list(METHODS) if "all" in options.method else options.method
    return options
