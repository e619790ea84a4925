"""Compares attention methods with a float64 oracle: the full product of methods and cases, or random cases.

Examples:
  # all methods in all cases of the product, on 1, 2 and 4 ranks; the result also as a file
  python -m conformance --json conformance.json
  # one method on two ranks, in one dtype
  python -m conformance --method ring --ranks 2 --dtype float64
  # random cases
  python -m conformance --random 2k --seed 1
  # repeat one of them, by the line that a failure prints
  python -m conformance --seed 1 --case 172
  # on one GPU shared by all ranks
  python -m conformance --device cuda --ranks 4 --dtype bfloat16

With --random N, case i of seed S is the same under all other options.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import torch

from armillary.core.testing import STAGED, World
from armillary.data.console.units import count_argument
from conformance.case import Case
from conformance.compositions import METHODS, Composition, compositions
from conformance.draw import KINDS_OF_CASES, RANKS, Trial, drawn, with_latents
from conformance.report import Report
from conformance.run import run
from conformance.sample import DTYPES, product_cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns 0 if all cases passed, 1 if a case failed, 2 if the machine has no such device."""
    options = parse_arguments(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: this machine has no GPU", file=sys.stderr)
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
    """Returns the random cases with the requested methods, ranks, dtypes and kinds."""
    indices = range(options.random) if options.case is None else options.case
    trials = [drawn(options.seed, index) for index in indices]
    if options.latents:
        trials = [with_latents(trial) for trial in trials]
    return [
        trial
        for trial in trials
        if trial.composition.method in options.methods
        and (options.ranks is None or trial.composition.ranks in options.ranks)
        and trial.case.dtype in options.dtypes
        and all(KINDS_OF_CASES[kind](trial) for kind in options.kind)
    ]


def _product(options: Namespace) -> list[Trial]:
    """Returns the requested methods on all of their meshes, each with all cases of the requested dtypes."""
    chosen = compositions(options.methods, options.ranks or [1, 2, 4])
    cases = list(product_cases(options.seed, options.dtypes))
    return [Trial(composition, case) for composition in chosen for case in cases if fits(composition, case)]


def fits(composition: Composition, case: Case) -> bool:
    """Returns True if there is a head for each rank of the head axis, as methods require."""
    return case.heads >= dict(composition.axes).get("ulysses", 1)


def parse_arguments(arguments: Sequence[str] | None) -> Namespace:
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    program = "python -m conformance"
    parser = ArgumentParser(program, f"{program} [options]", __doc__, formatter_class=RawDescriptionHelpFormatter)
    add, number, count = parser.add_argument, count_argument(0), count_argument()
    add("--random", type=number, metavar="N", help="number of random cases instead of the product")
    add("--case", type=number, nargs="+", metavar="I", help="only these random cases")
    add("--latents", action="store_true", help="random cases with latents instead of keys and values")
    add("--seed", type=number, default=0, metavar="S", help="random seed (default: 0)")
    add("--ranks", type=count, nargs="+", metavar="N", help="only these numbers of ranks (product: by default 1 2 4)")

    def add_choices(flag: str, default: list[str], choices: list[str], text: str) -> None:
        text = f"{text}: {', '.join(choices)}"
        add(flag, nargs="+", default=default, choices=choices, metavar=flag[2:].upper(), help=text)

    add_choices("--method", ["all"], [*METHODS, "all"], "only these methods")
    add_choices("--dtype", list(dtypes), list(dtypes), "only these dtypes")
    add_choices("--kind", [], list(KINDS_OF_CASES), "only random cases of all these kinds")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device of tensors (default: cpu)")
    add("--backend", choices=("gloo", STAGED), help="default: gloo, or on cuda staged, which sends through host memory")
    add("--json", type=Path, metavar="FILE", help="a file for the result")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and options.backend == "gloo":
        parser.error("--device cuda: needs --backend staged, which is the default there")
    if options.kind and options.random is None and options.case is None:
        parser.error("--kind: needs --random or --case")
    options.backend = options.backend or (STAGED if options.device == "cuda" else "gloo")
    options.dtypes = [dtypes[name] for name in options.dtype]
    options.methods = list(METHODS) if "all" in options.method else options.method
    return options
