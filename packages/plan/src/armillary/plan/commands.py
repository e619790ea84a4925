"""The commands of `armillary-plan`: each parses its flags, runs and prints its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from armillary.data.console import FAILED, Bar, check_picture, exit_with, parse, print_written
from armillary.plan import dry_run
from armillary.plan.memory import report as memory_report
from armillary.plan.memory.plan import MemoryOptions, plan_memory
from armillary.plan.memory.room import DoesNotFitError
from armillary.plan.search import report as search_report
from armillary.plan.search.command_line import write_choice
from armillary.plan.search.search import SearchOptions
from armillary.plan.search.search import search as search_all
from armillary.train.config import read_run


def run_command(program: str, name: str, argv: Sequence[str]) -> bool:
    """Runs a command. Returns False if nothing fits into memory.

    Raises:
        SystemExit: code 1, after a line with the reason, if a step needs too much memory to be simulated.
    """
    try:
        return COMMANDS[name](argv, f"{program} {name}")
    except DoesNotFitError as error:
        exit_with(program, str(error), FAILED)


def search(argv: Sequence[str], program: str) -> bool:
    """Runs `armillary-plan search`. Returns True if at least one choice fits into memory."""
    options = parse(argv, SearchOptions, program)
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


def memory(argv: Sequence[str], program: str) -> bool:
    """Runs `armillary-plan memory`. Returns True if the sequence fits."""
    options = parse(argv, MemoryOptions, program)
    with Bar("simulating", quiet=options.json) as bar:
        result = plan_memory(options, bar.show)
    print_result(options.json, partial(memory_report.as_dict, result), partial(memory_report.show, result))
    return result.fits


def run(argv: Sequence[str], program: str) -> bool:
    """Runs `armillary-plan run`. Returns True if the run fits."""
    options, _ = read_run(argv, dry_run.RunOptions, program)
    with Bar("simulating", quiet=options.json) as bar:
        result = dry_run.predict(options.run, options.cluster, partial(bar.show, "simulating"))
    print_result(options.json, partial(dry_run.as_dict, result), partial(dry_run.show, result))
    return result.fits


def print_result(as_json: bool, as_dict: Callable[[], dict[str, Any]], show: Callable[[], None]) -> None:
    """Prints the result of a command: `as_dict()` as JSON, or the tables that `show()` prints."""
    if as_json:
        print(json.dumps(as_dict(), indent=2))
    else:
        show()


COMMANDS: dict[str, Callable[[Sequence[str], str], bool]] = {
    "search": search,
    "memory": memory,
    "run": run,
}
