"""The command line: `armillary-plan` and its commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from armillary.core.commands import ending
from armillary.data.inspection.plot import check_picture
from armillary.data.parsing import parse
from armillary.data.progress import Bar
from armillary.plan import bytes_report, dry_run
from armillary.plan.comm_volume import BytesPlan, plan_bytes
from armillary.plan.dry_run.predict import predict, read_plan
from armillary.plan.memory import report
from armillary.plan.memory.plan import MemoryPlan, plan_memory
from armillary.plan.search import report as search_report
from armillary.plan.search.command_line import write_choice
from armillary.plan.search.plot import draw
from armillary.plan.search.search import SearchPlan, search

PROGRAM = "armillary-plan"
USAGE = """usage: armillary-plan [COMMAND] [options]

  # the fastest mesh, method and checkpoints, as a file for armillary-train --config
  armillary-plan --model llama3-8b --cluster 8xh100 --tokens 128Ki --out planned.toml
  # the longest sequence that fits
  armillary-plan memory --model llama3-8b --cluster 16xh100 --max-context
  # memory and time of a step, by the trainer's own flags
  armillary-plan run --recipe llama3_8b_1m --cluster 8xh100

commands:
  search   which mesh, method and checkpoints train a model fastest on a cluster, and why not the others (the default)
  memory   what a training step holds on each rank, and the longest sequence that fits
  run      memory and time of a run of the trainer, by its own flags
  bytes    what attention methods send, forward and backward, at any number of ranks

None needs a GPU. armillary-plan COMMAND --help lists the options."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command, and exits: with 2 and one line for what cannot be planned."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    command, rest = ("search", words) if not words or words[0].startswith("-") else (words[0], words[1:])
    with ending(PROGRAM):
        if command not in COMMANDS:
            raise ValueError(f"no command {command!r}; known: {', '.join(COMMANDS)}")
        COMMANDS[command](rest)


def find(argv: Sequence[str]) -> None:
    """`armillary-plan search`."""
    plan = parse(argv, SearchPlan, f"{PROGRAM} search")
    if plan.plot is not None:
        check_picture(plan.plot, "--plot")
    with Bar(quiet=plan.json) as bar:
        found = search(plan, partial(bar.show, "meshes and methods"))
    if plan.out is not None:
        write_choice(found, plan.out)
    if plan.plot is not None:
        print(f"drawn: {draw(found, plan.plot)}", file=sys.stderr)
    if plan.json:
        print(search_report.as_json(found))
    else:
        search_report.show(found)


def memory(argv: Sequence[str]) -> None:
    """`armillary-plan memory`."""
    plan = parse(argv, MemoryPlan, f"{PROGRAM} memory")
    with Bar("simulating", quiet=plan.json) as bar:
        planned = plan_memory(plan, bar.show)
    if plan.json:
        print(report.as_json(planned))
    else:
        report.show(planned)


def trainer_run(argv: Sequence[str]) -> None:
    """`armillary-plan run`."""
    plan = read_plan(argv, f"{PROGRAM} run")
    with Bar("simulating", quiet=plan.json) as bar:
        found = predict(plan.run, plan.cluster, partial(bar.show, "simulating"))
    if plan.json:
        print(dry_run.as_json(found))
    else:
        dry_run.show(found)


def sent(argv: Sequence[str]) -> None:
    """`armillary-plan bytes`."""
    plan = parse(argv, BytesPlan, f"{PROGRAM} bytes")
    with Bar(quiet=plan.json) as bar:
        rows = plan_bytes(plan, bar.show)
    if plan.json:
        print(bytes_report.as_json(plan, rows))
    else:
        bytes_report.show(plan, rows)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "search": find,
    "memory": memory,
    "run": trainer_run,
    "bytes": sent,
}
