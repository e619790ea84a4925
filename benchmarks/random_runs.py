"""Random runs of the trainer: every step is verified, none may be called wrong, and the losses are those of one rank.

    python benchmarks/random_runs.py                       # all cases of seed 1, with a report
    python benchmarks/random_runs.py --seed 7 --cases 40   # others, without a report
    python benchmarks/random_runs.py --seed 7 --case 31    # cases again, with their flags, errors and facts

A case is a model, its data, and two setups, each with a mesh, an attention method, a layout, a checkpointing policy, a
compiler and micro-batches. The first setup trains two steps, verified, and in one case of four not verified too, which
must agree to the last bit. The second setup resumes the checkpoint and trains two more, verified. One rank trains all
four.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from math import isclose, lcm
from pathlib import Path
from queue import SimpleQueue
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from armillary.check import error_line
from armillary.core.testing import RankFailed, Worlds
from armillary.data.console.units import count_argument
from armillary.train import prepare, process_group, train_loop
from armillary.train.config import ConfiguredRun, read_run

sys.path.insert(0, str(Path(__file__).parent))
import report

SEED, CASES, STEPS, SECONDS = 1, 120, 2, 900.0
LIMITS = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 5e-2}
"""Largest relative difference of a step's loss to that of one rank in the same precision."""
FIXED = (
    "--train.device cpu --model.dim 32 --model.heads 4 --optimizer.schedule constant --optimizer.warmup-steps 0 "
    "--log.every 1000 --log.no-plot --validation.every 1000 --validation.batches 1"
)
"""Flags of all runs."""

Flags = dict[str, Any]


# -- random cases -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """The flags with which a run may be resumed.

    Args:
        kinds: the names under which the report counts them.
    """

    ranks: int
    flags: Flags
    kinds: tuple[str, ...]

    @property
    def row_groups(self) -> int:
        """Groups of rows in a step: one for each replica and micro-batch."""
        return self.flags["parallel.replicate"] * self.flags["parallel.shard"] * self.flags["train.accumulation"]


@dataclass(frozen=True)
class Case:
    """The flags of a model and its data, which stay, and the setups of start and resumption."""

    flags: Flags
    setups: tuple[Setup, Setup]
    kinds: tuple[str, ...]
    also_plain: bool = False


def drawn(seed: int, number: int) -> Case:
    """Returns the case of this seed and number."""
    random = Random(f"{seed} {number}")
    model, kinds = drawn_model(random)
    documents = random.random() < 0.5
    data: Flags = {
        "data.sequence-length": random.randint(24, 200),
        "data.documents": documents,
        "data.reset-positions": random.random() < 0.4,
        "data.packing": random.choice(("greedy", "greedy", "best_fit", "one_per_row")),
        "train.precision": random.choice(("float64", "float64", "float64", "float32", "bfloat16")),
        "train.seed": random.randint(0, 99),
    }
    kinds += [data["train.precision"], *(["documents"] if documents else [])]
    setups = drawn_setup(random, model), drawn_setup(random, model)
    if model.get("model.family") != "gpt":
        tp = max(setup.flags["parallel.tp"] for setup in setups)
        data["model.kv-heads"] = random.choice([heads for heads in (1, 2, 4, 4) if heads % tp == 0])
    # Rows that replicas and micro-batches of both setups share evenly.
    data["data.global-batch-size"] = lcm(*(setup.row_groups for setup in setups)) * random.choice((1, 2))
    return Case(model | data, setups, tuple(kinds), also_plain=number % 4 == 0)


def drawn_model(random: Random) -> tuple[Flags, list[str]]:
    """Draws a GPT, or a LLaMA with layers of attention, of attention with latents, or with a state."""
    layers = random.randint(1, 4)
    if random.random() < 0.15:
        return {"model.family": "gpt", "model.layers": layers}, ["gpt"]
    flags: Flags = {
        "model.layers": layers,
        "model.hidden-dim": 48,
        "model.tied-embeddings": random.random() < 0.4,
        "model.qk-norm": random.random() < 0.2,
    }
    kinds = ["llama"] + ["tied"] * flags["model.tied-embeddings"]
    if random.random() < 0.4:
        mixers = random.choices(("attention", "delta_rule", "mamba2"), k=random.randint(1, min(3, layers)))
        flags["model.mixers"] = mixers
        kinds += sorted({*mixers} - {"attention"})
    elif random.random() < 0.25 and not flags["model.qk-norm"]:
        flags |= {"model.latent-rank": 16, "model.latent-key-dim": 8}
        flags |= {"model.latent-query-rank": 16} if random.random() < 0.5 else {}
        kinds.append("latents")
    return flags, kinds


def drawn_setup(random: Random, model: Flags) -> Setup:
    """Draws a mesh of 2 to 4 ranks, and flags that suit it in most cases; the trainer refuses others."""
    ranks, axes = random.choice((2, 2, 3, 4, 4)), Counter[str]()
    for factor in {4: (2, 2)}.get(ranks, (ranks,)):
        names = ("replicate", "shard", "ring", "ring", "ulysses", "tp")
        axis = random.choice(names)
        axes[axis] = max(axes[axis], 1) * factor
    ring, ulysses = (max(axes[name], 1) for name in ("ring", "ulysses"))
    sequence = random.choice(("ring", "token_ring", "wallfacer", "all_gather", *(["ring+ring"] if ring == 4 else [])))
    head = random.choice(("ulysses", "upipe"))
    attention = {(False, False): "local", (True, False): sequence, (False, True): head}.get(
        (ring > 1, ulysses > 1), f"{head}+{sequence}"
    )
    stateful = {*model.get("model.mixers", ())} - {"attention"}
    policy = random.choice(("none", "none", "layer", "attention_output"))
    accumulation = random.choice((1, 1, 2))
    flags: Flags = {f"parallel.{name}": max(axes[name], 1) for name in ("replicate", "shard", "ring", "ulysses", "tp")}
    flags |= {
        "parallel.attention": attention,
        "parallel.zero-stage": random.choice((1, 2, 3, 3)),
        "data.layout": random.choice(("zigzag", "contiguous", "balanced", *([] if stateful else ["striped"]))),
        "checkpointing.policy": policy,
        "checkpointing.tiled": random.random() < 0.25,
        "checkpointing.offload": policy != "none" and random.random() < 0.3,
        "optimizer.cpu-offload": random.random() < 0.1,
        "train.accumulation": accumulation,
        "parallel.contiguous-states": bool(stateful) and not axes["tp"] and random.random() < 0.4,
    }
    if random.random() < 0.15:
        flags["parallel.compiler"] = "aot_eager"
    kinds = [name for name, size in axes.items() if size > 1] + [f"layout {flags['data.layout']}", f"policy {policy}"]
    kinds += ["accumulation"] if accumulation > 1 else []
    kinds += [
        name
        for name in ("tiled", "compiler", "contiguous-states", "offload")
        if any(flags.get(f"{section}.{name}") for section in ("checkpointing", "parallel"))
    ]
    return Setup(ranks, flags, (attention, *kinds))


def words(flags: Flags) -> list[str]:
    """Returns the words of a command line."""
    line = list[str]()
    for name, value in flags.items():
        if value is True:
            line.append(f"--{name}")
        elif value is not False:
            line += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return line


# -- runs -------------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The result of a case: "equal", "refused", or the kind of its failure, with the error.

    Args:
        facts: (fact, verdict) of each verified step.
    """

    result: str
    error: str = ""
    facts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    @property
    def is_failure(self) -> bool:
        return self.result not in ("equal", "refused")


def train_on_rank(argv: Sequence[str]) -> list[float] | str:
    """Trains on one rank of a world; returns the losses, or the reason of a refusal before the first step."""
    torch.compiler.reset()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # blocks beyond its limit of graphs run eagerly
    with redirect_stdout(io.StringIO()):
        try:
            config = read_run(argv, ConfiguredRun, "armillary-train")[0].run
            with process_group(config) as device:
                run = prepare(config, device)
        except ValueError as error:
            return str(error)
        return train_loop(run).losses


class Refused(Exception):
    """The trainer refused the flags before the first step."""


class CaseRunner:
    """Trains cases on worlds that later cases reuse, from text in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.worlds, self.folder, self.texts = Worlds(), folder, folder / "texts"
        self.texts.mkdir(parents=True)
        for i in range(400):  # short documents
            text = f"ring turn token head key axis shard zig {i} " * 20
            (self.texts / f"{i}.txt").write_text(text[: 20 + i * 37 % 400])

    def train(self, flags: Flags, output: str, steps: int, ranks: int = 1, verified: bool = False) -> list[float]:
        argv = [*FIXED.split(), *words(flags), "--data.path", str(self.texts), "--train.steps", str(steps)]
        argv += ["--train.output", str(self.folder / output), *(["--check.verify-every", "1"] if verified else [])]
        answers = self.worlds(ranks).run(train_on_rank, argv, timeout=SECONDS)
        losses = answers[0]
        if isinstance(losses, str):
            raise Refused(losses)
        assert answers == [losses] * ranks, "ranks report other losses"
        return losses

    def outcome(self, case: Case, name: str) -> Outcome:
        """Trains all runs of a case, in folders whose names begin with `name`."""
        first, second = case.setups
        try:
            losses = self.train(case.flags | first.flags, name, STEPS, first.ranks, verified=True)
            plain = losses
            if case.also_plain:
                plain = self.train(case.flags | first.flags, f"{name}-plain", STEPS, first.ranks)
            losses = losses + self.train(case.flags | second.flags, name, 2 * STEPS, second.ranks, verified=True)
            expected = self.train(case.flags, f"{name}-one", 2 * STEPS)
        except Refused as refusal:
            return Outcome("refused", str(refusal))
        except RankFailed as failure:
            alarm = "is wrong" in error_line(failure)
            return Outcome("false alarm" if alarm else "failed", str(failure))
        facts = self.facts(name)
        if plain != losses[:STEPS]:
            return Outcome("other bits", f"verified {losses[:STEPS]}, not verified {plain}", facts)
        limit = LIMITS[case.flags["train.precision"]]
        if not all(isclose(a, b, rel_tol=limit) for a, b in zip(losses, expected, strict=True)):
            return Outcome("other losses", f"{losses}; on one rank {expected}", facts)
        return Outcome("equal", facts=facts)

    def facts(self, name: str) -> list[tuple[str, str]]:
        """Returns (fact, verdict) of all verified steps that are in the log of a run."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        texts = [event["text"] for event in map(json.loads, lines) if event.get("event") == "verified"]
        return [
            (fact, rest.partition(":")[0])
            for text in texts
            for fact, _, rest in (line.partition(": ") for line in text.splitlines())
        ]


# -- report -----------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=SEED, help=f"random seed (default: {SEED})")
    add("--cases", type=count_argument(), default=CASES, help=f"number of cases (default: {CASES})")
    add("--case", type=int, nargs="+", metavar="I", help="only these cases")
    add("--jobs", type=count_argument(), default=2, help="number of cases at a time (default: 2)")
    options = parser.parse_args(argv)
    numbers, outcomes = options.case or range(options.cases), dict[int, Outcome]()
    with_report = options.case is None and (options.seed, options.cases) == (SEED, CASES)
    for number, outcome in run_cases(options.seed, numbers, options.jobs):
        outcomes[number] = outcome
        counts = Counter(x.result for x in outcomes.values())
        progress = ", ".join(f"{count} {result}" for result, count in counts.items())
        reason = f"; case {number} is refused: {outcome.error}" if outcome.result == "refused" else ""
        print(f"{len(outcomes)} of {len(numbers)}: {progress}{reason}", flush=True)
        if outcome.is_failure or options.case:
            show(options.seed, number, outcome, facts=bool(options.case))
        if with_report:  # after each case, because a long run may be interrupted
            write_report(outcomes)
    return int(any(x.is_failure for x in outcomes.values()))


def run_cases(seed: int, numbers: Sequence[int], jobs: int) -> Iterator[tuple[int, Outcome]]:
    """Yields the outcome of each case when it is complete."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        runners, idle = [CaseRunner(Path(folder, f"job-{i}")) for i in range(jobs)], SimpleQueue[CaseRunner]()
        for runner in runners:
            idle.put(runner)

        def run(number: int) -> tuple[int, Outcome]:
            runner = idle.get()
            outcome = runner.outcome(drawn(seed, number), f"case-{number}")
            idle.put(runner)
            return number, outcome

        for future in as_completed([pool.submit(run, number) for number in numbers]):
            yield future.result()
        for runner in runners:
            runner.worlds.close()


def show(seed: int, number: int, outcome: Outcome, facts: bool) -> None:
    """Prints the flags of a case and its error."""
    case = drawn(seed, number)
    for setup in case.setups:
        print(f"  {setup.ranks} ranks: {' '.join(words(case.flags | setup.flags))}")
    print(f"  case {number}: {outcome.result}: {outcome.error}", flush=True)
    for (fact, verdict), count in Counter(outcome.facts).items() if facts else ():
        print(f"  {fact}: {verdict} in {count} steps")


def write_report(outcomes: dict[int, Outcome]) -> None:
    """Writes the numbers of cases by kind, and of facts by verdict."""
    results = {"equal": "equal to one rank", "refused": "refused before the first step", "failed": "wrong or failed"}
    by_kind: dict[str, Counter[str]] = {}
    for number, outcome in outcomes.items():
        case = drawn(SEED, number)
        result = "failed" if outcome.is_failure else outcome.result
        for kind in dict.fromkeys(("all", *case.kinds, *(x for setup in case.setups for x in setup.kinds))):
            by_kind.setdefault(kind, Counter())[result] += 1
    rows = [
        {
            "cases with": kind,
            "cases": by_kind[kind].total(),
            **{title: by_kind[kind][x] for x, title in results.items()},
        }
        for kind in ["all", *sorted({*by_kind} - {"all"})]
    ]
    facts = Counter(fact for outcome in outcomes.values() for fact in outcome.facts)
    lines = [
        f"{name}: right in {facts[name, 'right']} steps, not observed in {facts[name, 'not observed']}"
        for name in dict.fromkeys(x for x, _ in facts)
    ]
    failures = Counter(x.result for x in outcomes.values() if x.is_failure)
    limits = ", ".join(f"{limit:g} in {dtype}" for dtype, limit in LIMITS.items())
    notes = [
        f"{len(outcomes)} of {CASES} cases",
        f"{STEPS} steps, then {STEPS} resumed on the second mesh; largest relative difference of a loss: {limits}",
        f"wrong or failed: {', '.join(f'{count} {result}' for result, count in failures.items()) or 'none'}",
        *lines,
    ]
    report.write("random-runs", "Random runs of the trainer, verified in every step", rows, notes)


if __name__ == "__main__":
    sys.exit(main())
