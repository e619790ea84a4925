"""The command line `armillary-plan` and its commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from armillary.data.console.exit import FAILED, exit_on_error, exit_with
from armillary.data.console.picture import check_picture, print_written
from armillary.data.parsing import parse
from armillary.data.progress import Bar
from armillary.plan import comm_volume, dry_run
from armillary.plan.comm_volume import BytesOptions, plan_bytes
from armillary.plan.memory import report as memory_report
from armillary.plan.memory.plan import MemoryOptions, plan_memory
from armillary.plan.memory.room import DoesNotFitError
from armillary.plan.search import report as search_report
from armillary.plan.search.command_line import write_choice
from armillary.plan.search.search import SearchOptions
from armillary.plan.search.search import search as search_all
from armillary.plan.steps import command as steps_command
from armillary.plan.steps.command import StepsOptions, plan_steps, write_steps

PROGRAM = "armillary-plan"
USAGE = """usage: armillary-plan [COMMAND] [options]

  # the fastest mesh, method and checkpoints, as a file for armillary-train --config
  armillary-plan --model llama3-8b --cluster 8xh100 --tokens 128Ki --out planned.toml
  # the longest sequence that fits
  armillary-plan memory --model llama3-8b --cluster 16xh100 --max-context
  # memory and time of a step, by the trainer's own flags
  armillary-plan run --recipe llama3_8b_1m --cluster 8xh100

commands:
  search   the fastest mesh, method and checkpoints for a model on a cluster, and why others are slower; the default
  memory   peak memory of a training step on one rank, and the longest sequence that fits
  run      memory and time of a run of the trainer, by its own flags
  bytes    bytes that attention methods send, forward and backward, at any number of ranks
  steps    a method step by step, as a page or a picture: sends between ranks, and the blocks that they compute

None needs a GPU. armillary-plan COMMAND --help lists the options.
Exit codes: 0; 1 if the model or the sequence does not fit into memory; 2 for wrong arguments."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command. Exits with 1 if nothing fits into memory, and with 2 and one line if arguments are wrong."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    # If the first word is a flag, the command is `search`.
    command, words = ("search", words) if not words or words[0].startswith("-") else (words[0], words[1:])
    fits = None
    with exit_on_error(PROGRAM):
        if command not in COMMANDS:
            raise ValueError(f"no command {command!r}; known: {', '.join(COMMANDS)}")
        try:
            fits = COMMANDS[command](words)
        except DoesNotFitError as error:
            exit_with(PROGRAM, str(error), FAILED)
    if fits is False:
        sys.exit(FAILED)


def search(argv: Sequence[str]) -> bool:
    """Runs `armillary-plan search`. Returns True if at least one choice fits into memory."""
    options = parse(argv, SearchOptions, f"{PROGRAM} search")
    if options.plot is not None:
        check_picture(options.plot, "--plot")
    with Bar(quiet=options.json) as bar:
        result = search_all(options, partial(bar.show, "meshes and methods"))
    if result.fitting and options.out is not None:
        write_choice(result, options.out)
        print_written(options.out)
    if result.fitting and options.plot is not None:
        print_written(search_report.draw(result, options.plot))
    print_result(options.json, partial(search_report.as_dict, result), partial(search_report.show, result))
    return bool(result.fitting)


def memory(argv: Sequence[str]) -> bool:
    """Runs `armillary-plan memory`. Returns True if the sequence fits."""
    options = parse(argv, MemoryOptions, f"{PROGRAM} memory")
    with Bar("simulating", quiet=options.json) as bar:
        result = plan_memory(options, bar.show)
    print_result(options.json, partial(memory_report.as_dict, result), partial(memory_report.show, result))
    return result.fits


def run(argv: Sequence[str]) -> bool:
    """Runs `armillary-plan run`. Returns True if the run fits."""
    options = dry_run.read_options(argv, f"{PROGRAM} run")
    with Bar("simulating", quiet=options.json) as bar:
        result = dry_run.predict(options.run, options.cluster, partial(bar.show, "simulating"))
    print_result(options.json, partial(dry_run.as_dict, result), partial(dry_run.show, result))
    return result.fits


def sent_bytes(argv: Sequence[str]) -> None:
    """Runs `armillary-plan bytes`."""
    options = parse(argv, BytesOptions, f"{PROGRAM} bytes")
    with Bar(quiet=options.json) as bar:
        results = plan_bytes(options, bar.show)
    print_result(
        options.json, partial(comm_volume.as_dict, options, results), partial(comm_volume.show, options, results)
    )


def steps(argv: Sequence[str]) -> None:
    """Runs `armillary-plan steps`."""
    options = parse(argv, StepsOptions, f"{PROGRAM} steps")
    methods = plan_steps(options)
    if options.out is not None:
        write_steps(options, methods)
    print_result(
        options.json, partial(steps_command.as_dict, options, methods), partial(steps_command.show, options, methods)
    )


def print_result(as_json: bool, as_dict: Callable[[], dict[str, Any]], show: Callable[[], None]) -> None:
    """Prints the result of a command: `as_dict()` as JSON, or the tables that `show()` prints."""
    if as_json:
        print(json.dumps(as_dict(), indent=2))
    else:
        show()


COMMANDS: dict[str, Callable[[Sequence[str]], bool | None]] = {
    "search": search,
    "memory": memory,
    "run": run,
    "bytes": sent_bytes,
    "steps": steps,
}
