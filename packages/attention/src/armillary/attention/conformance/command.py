"""The full product of methods and cases by one command, with its result as a table."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from armillary.attention.conformance.case import DTYPES, Case, product_cases, random_cases
from armillary.attention.conformance.check import errors, sharding_of
from armillary.attention.conformance.compositions import METHODS, Composition, compositions
from armillary.attention.conformance.expected import limits
from armillary.core.testing import RankFailed, World

CHUNK = 30
"""Cases for each call to a world: a rank that hangs costs so many of them a second try."""


class Verdict(NamedTuple):
    """What one case gave on one rank: the tensor that came nearest to its limit, and what is wrong, if anything is."""

    fraction: float
    tensor: str
    failure: str


@dataclass
class Row:
    """One line of the table: a method in one dtype."""

    method: str
    dtype: str
    cases: int = 0
    worst: float = 0.0
    tensor: str = ""
    where: str = ""
    failures: list[str] = field(default_factory=list[str])

    def add(self, composition: Composition, case: Case, verdicts: Sequence[Verdict]) -> None:
        """Takes in what all ranks said of one case."""
        worst = max(verdicts, key=lambda verdict: verdict.fraction)
        self.cases += 1
        if worst.fraction > self.worst:
            self.worst, self.tensor, self.where = worst.fraction, worst.tensor, f"{composition}: {case}"
        failed = [f"rank {rank}: {verdict.failure}" for rank, verdict in enumerate(verdicts) if verdict.failure]
        if failed:
            self.failures.append(f"{composition}: {case}: {'; '.join(failed)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; 1 if anything failed."""
    options = _options(arguments)
    todo = _todo(options)
    began, rows = time.monotonic(), dict[tuple[str, str], Row]()
    with ExitStack() as open_worlds:
        world: World | None = None
        for index, (composition, chosen) in enumerate(todo, 1):
            if world is None or world.size != composition.ranks:
                open_worlds.close()
                world = open_worlds.enter_context(World(composition.ranks))
            start, failed = time.monotonic(), 0
            for case, verdicts in run(world, composition, chosen):
                dtype = str(case.dtype).removeprefix("torch.")
                row = rows.setdefault((composition.method, dtype), Row(composition.method, dtype))
                row.add(composition, case, verdicts)
                failed += any(verdict.failure for verdict in verdicts)
            took = time.monotonic() - start
            counts = f"{len(chosen)} cases, {failed} failed, {took:.0f} s"
            print(f"[{index}/{len(todo)}] {composition}: {counts}", flush=True)
            if options.json:  # so far: a run of an hour may be cut short
                save(options.json, rows.values(), time.monotonic() - began)
    order = list(METHODS)
    report(sorted(rows.values(), key=lambda row: (order.index(row.method), row.dtype)), time.monotonic() - began)
    return int(any(row.failures for row in rows.values()))


def run(world: World, composition: Composition, chosen: Sequence[Case]) -> Iterator[tuple[Case, Sequence[Verdict]]]:
    """Each case with the verdict of each rank. Where a rank raises or hangs, the cases are tried again one by one."""
    for start in range(0, len(chosen), CHUNK):
        chunk = chosen[start : start + CHUNK]
        try:
            ranks = world.run(judge, composition, chunk, timeout=300)
            yield from zip(chunk, zip(*ranks, strict=True), strict=True)
        except RankFailed:
            for case in chunk:
                try:
                    yield case, [verdicts[0] for verdicts in world.run(judge, composition, [case], timeout=30)]
                except RankFailed as failure:
                    yield case, [Verdict(float("inf"), "none", str(failure))]


def judge(composition: Composition, chosen: Sequence[Case]) -> list[Verdict]:
    """What this rank has to say of each case."""
    torch.set_num_threads(1)
    attend, verdicts = composition.build(), list[Verdict]()
    for case in chosen:
        try:
            found, allowed = errors(attend, case), limits(case, sharding_of(attend, case))
        except AssertionError as failure:
            verdicts.append(Verdict(float("inf"), "none", str(failure)))
            continue
        fractions = {name: found[name] / allowed[name] for name in found}
        tensor = max(fractions, key=fractions.__getitem__)
        wrong = [
            f"{name} off by {found[name]:.2g} (limit {allowed[name]:.2g})" for name in found if fractions[name] > 1
        ]
        verdicts.append(Verdict(fractions[tensor], tensor, ", ".join(wrong)))
    return verdicts


def report(table: Sequence[Row], seconds: float) -> None:
    """Prints the table and every failure."""
    width = max([len(row.method) for row in table], default=6)
    print(f"\n{'method':{width}}  {'dtype':8}  {'cases':>5}  {'failed':>6}  worst error, as a fraction of its limit")
    for row in table:
        counts = f"{row.cases:5}  {len(row.failures):6}"
        print(f"{row.method:{width}}  {row.dtype:8}  {counts}  {row.worst:.2g} ({row.tensor}, {row.where})")
    failures = [failure for row in table for failure in row.failures]
    print(f"\n{sum(row.cases for row in table)} cases, {len(failures)} failed, {seconds:.0f} s")
    print("\n".join(f"FAILED {failure}" for failure in failures), end="\n" if failures else "")


def save(file: Path, rows: Iterable[Row], seconds: float) -> None:
    """Writes the table to a file."""
    result = {"torch": torch.__version__, "seconds": round(seconds), "rows": [vars(row) for row in rows]}
    file.write_text(json.dumps(result, indent=2) + "\n")


def _todo(options: Namespace) -> list[tuple[Composition, list[Case]]]:
    """Which cases to run on which compositions."""
    methods = list(METHODS) if "all" in options.method else options.method
    chosen = compositions(methods, options.ranks)
    if options.sample is None:
        todo = [(composition, list(product_cases(options.seed, options.dtypes))) for composition in chosen]
    else:
        drawn = list(islice(random_cases(options.seed, options.dtypes), options.sample))
        todo = [(composition, drawn[index :: len(chosen)]) for index, composition in enumerate(chosen)]
    fitting = [(composition, [case for case in some if fits(composition, case)]) for composition, some in todo]
    return [(composition, some) for composition, some in fitting if some]


def fits(composition: Composition, case: Case) -> bool:
    """Whether there is a head for each rank of the head axis: fewer are refused."""
    return case.heads >= dict(composition.axes).get("ulysses", 1)


def _options(arguments: Sequence[str] | None) -> Namespace:
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    parser = ArgumentParser("python -m armillary.attention.conformance", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="sizes of the worlds")
    parser.add_argument("--method", nargs="+", default=["all"], choices=[*METHODS, "all"])
    parser.add_argument("--dtype", nargs="+", default=list(dtypes), choices=list(dtypes))
    parser.add_argument("--sample", type=int, help="so many cases at random, over all methods, instead of the product")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at random")
    parser.add_argument("--json", type=Path, help="a file for the result")
    options = parser.parse_args(arguments)
    options.dtypes = [dtypes[name] for name in options.dtype]
    return options
